"""The curve of hit rate over memory: in the terminal, with signs alone, and as a picture, where matplotlib is installed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from kvstore.bench.replay_report import Row
from kvstore.config import format_bytes
from kvstore.errors import ConfigError, InvalidArgument

HEIGHT = 14  # lines of a plot: a screen holds one with its table's end
STEP = 12  # characters between two sizes: as wide as a size is written
SIGNS = "●▲■◆○△□◇"  # one a curve

Curve = list[tuple[int, float]]  # (dram bytes, hit rate), by size


def curves_of(rows: Sequence[Row]) -> dict[int, dict[str, Curve]]:
    """By size of the disk and policy."""
    found: dict[int, dict[str, Curve]] = {}
    for row in rows:
        if not row.unlimited:
            found.setdefault(row.nvme_bytes, {}).setdefault(row.setup.eviction, []).append((row.dram_bytes, row.hit_rate))
    return {disk: {name: sorted(curve) for name, curve in curves.items()} for disk, curves in found.items()}


def _most(rows: Sequence[Row]) -> float:
    return next((row.hit_rate for row in rows if row.unlimited), 0.0)


def terminal_plot(rows: Sequence[Row]) -> list[str]:
    """A plot for each size of the disk. The dashed line is a cache of everything."""
    lines: list[str] = []
    for disk, curves in curves_of(rows).items():
        below = f"with {format_bytes(disk)} of nvme" if disk else "without nvme"
        lines += [f"hit rate over dram, {below}", *_plot(curves, _most(rows)), ""]
    return lines


def _plot(curves: dict[str, Curve], most: float) -> list[str]:
    sizes = sorted({size for curve in curves.values() for size, _ in curve})
    top = max([most, *(rate for curve in curves.values() for _, rate in curve)]) or 1.0
    width = STEP * len(sizes)
    canvas = [[" "] * width for _ in range(HEIGHT + 1)]

    def level(rate: float) -> int:
        return HEIGHT - round(rate / top * HEIGHT)

    if most:
        canvas[level(most)] = ["╌"] * width
    for curve in curves.values():
        for (size, rate), (next_size, next_rate) in itertools.pairwise(curve):
            first, last = _column(sizes, size), _column(sizes, next_size)
            for column in range(first + 1, last):
                canvas[level(rate + (next_rate - rate) * (column - first) / (last - first))][column] = "·"
    for sign, curve in zip(SIGNS, curves.values(), strict=False):
        for size, rate in curve:
            _put(canvas[level(rate)], _column(sizes, size), sign)
    lines = [f"{top * (HEIGHT - at) / HEIGHT:>7.1%} ┤{''.join(cells).rstrip()}" for at, cells in enumerate(canvas)]
    lines.append(" " * 8 + "└" + "─" * width)
    lines.append(" " * 9 + "".join(f"{format_bytes(size):^{STEP}}" for size in sizes).rstrip())
    return [*lines, " " * 9 + "   ".join(f"{sign} {name}" for sign, name in zip(SIGNS, curves, strict=False))]


def _column(sizes: list[int], size: int) -> int:
    return STEP * sizes.index(size) + STEP // 2


def _put(cells: list[str], column: int, sign: str) -> None:
    """A sign at its place, or beside the one that is there."""
    while cells[column] in SIGNS and column + 1 < len(cells):
        column += 1
    cells[column] = sign


def need_matplotlib() -> None:
    """Raises ConfigError where no picture can be drawn."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError("--png: matplotlib is not installed; pip install 'kvstore[bench]', or leave --png out") from error


def draw_png(path: Path, rows: Sequence[Row]) -> None:
    """The same curves as a picture, one panel for each size of the disk. Needs matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, PercentFormatter

    panels = curves_of(rows)
    figure = Figure(figsize=(5.5 * len(panels), 4.2), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for panel, (disk, curves) in zip(axes, panels.items(), strict=True):
        for name, curve in curves.items():
            style = {"linestyle": "--", "color": "gray"} if name == "optimum" else {}
            panel.plot(*zip(*curve, strict=True), marker="o", markersize=4, label=name, **style)
        panel.axhline(_most(rows), color="black", linewidth=0.8, linestyle=":", label="unlimited")
        panel.set_xscale("log", base=2)
        panel.set_xticks(sorted({size for curve in curves.values() for size, _ in curve}))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_bytes(size)))
        panel.yaxis.set_major_formatter(PercentFormatter(1.0))
        panel.set_ylim(bottom=0)
        panel.set_title(f"with {format_bytes(disk)} of NVMe" if disk else "without NVMe")
        panel.set_xlabel("DRAM")
        panel.grid(alpha=0.3)
    axes[0].set_ylabel("blocks found")
    axes[0].legend()
    figure.suptitle(rows[0].trace.name)
    try:
        figure.savefig(path, format="png", dpi=120, metadata={"Software": None})
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}; name a file that can be written") from error
