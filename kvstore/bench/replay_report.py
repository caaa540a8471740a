"""The figures of a replay: one row a cell of the grid, as text and as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from kvstore.bench.replay_machine import Machine
from kvstore.bench.replay_tiers import Outcome, Setup
from kvstore.bench.replay_trace import BLOCK_TOKENS, Trace
from kvstore.config import format_bytes

_COLUMNS = ("dram", "nvme", "eviction", "hits", "in dram", "on nvme", "dram out", "nvme out", "dropped", "written", "read", "TTFT", "saved")
_WIDTHS = (11, 10, 10, 8, 9, 9, 10, 10, 9, 11, 11, 9, 8)  # characters of each column


@dataclass(frozen=True)
class Row:
    """One cell of the grid and what came of it."""

    setup: Setup
    unlimited: bool
    outcome: Outcome
    trace: Trace
    machine: Machine

    @property
    def dram_bytes(self) -> int:
        """Size of host memory, in whole blocks."""
        return self.setup.dram_blocks * self.machine.block_bytes

    @property
    def nvme_bytes(self) -> int:
        """Size of the disk, in whole blocks."""
        return self.setup.nvme_blocks * self.machine.block_bytes

    @property
    def hit_rate(self) -> float:
        """Blocks found over all blocks of all prompts."""
        return self.dram_hit_rate + self.nvme_hit_rate

    @property
    def dram_hit_rate(self) -> float:
        """Those that were in host memory on arrival."""
        return self.outcome.dram_hit_blocks / self.trace.touched_blocks

    @property
    def nvme_hit_rate(self) -> float:
        """Those that came up from the disk."""
        return self.outcome.nvme_hit_blocks / self.trace.touched_blocks

    @property
    def ttft_saved(self) -> float:
        """The part of all time to first tokens that the store saves."""
        return 1 - self.outcome.warm_s / self.outcome.cold_s if self.outcome.cold_s else 0.0

    def moved_bytes(self, counter: str) -> int:
        """Bytes of the blocks that a counter of the cache counts."""
        return self.outcome.counters.get(counter, 0) * self.machine.block_bytes


def summary(trace: Trace, machine: Machine) -> list[str]:
    """What is replayed, on what."""
    requests = trace.requests
    duration_s = requests[-1].at_s - requests[0].at_s
    new_bytes = trace.distinct_blocks * machine.block_bytes
    rate = f", {new_bytes / duration_s / 1e9:.2f} GB/s of new KV" if duration_s else ""
    speeds = [f"{name} {_gbps(speed)}" for name, speed in _speeds(machine)]
    return [
        f"trace    {trace.name}: {len(requests):,} prompts in {duration_s:,.0f} s, {trace.input_tokens / len(requests):,.0f} tokens each",
        f"blocks   {trace.touched_blocks:,} of {BLOCK_TOKENS} tokens, {trace.distinct_blocks:,} distinct: {format_bytes(new_bytes)}{rate}",
        f"machine  {machine.token_bytes:,} bytes a token ({format_bytes(machine.block_bytes)} a block), {', '.join(speeds)}",
        f"model    {machine.prefill_tokens_per_s:,.0f} tokens/s, attention as dear as the rest at {machine.quadratic_tokens:,.0f} tokens",
    ]


def _speeds(machine: Machine) -> tuple[tuple[str, float], ...]:
    return (("dram", machine.dram_bytes_per_s), ("nvme read", machine.nvme_read_bytes_per_s), ("write", machine.nvme_write_bytes_per_s))


def _gbps(speed: float) -> str:
    return "at once" if math.isinf(speed) else f"{speed / 1e9:g} GB/s"


def header() -> list[str]:
    """The table's first line."""
    return [_joined(_COLUMNS).rstrip()]


def _joined(cells: tuple[str, ...]) -> str:
    padded = [f"{cell:>{width - 2}}  " for cell, width in zip(cells, _WIDTHS, strict=True)]
    padded[2] = f"{cells[2]:<{_WIDTHS[2]}}"
    return "".join(padded)


def line(row: Row) -> str:
    """One row of the table."""
    counters, requests = row.outcome.counters, len(row.trace.requests)
    cells = (
        "unlimited" if row.unlimited else format_bytes(row.dram_bytes),
        format_bytes(row.nvme_bytes) if row.setup.nvme_blocks else "-",
        "-" if row.unlimited else row.setup.eviction,
        f"{row.hit_rate:.1%}",
        f"{row.dram_hit_rate:.1%}",
        f"{row.nvme_hit_rate:.1%}",
        f"{counters.get('evicted_dram', 0)}",
        f"{counters.get('evicted_nvme', 0)}",
        f"{counters.get('dropped_before_written', 0)}",
        format_bytes(row.moved_bytes("demoted")),
        format_bytes(row.moved_bytes("promoted")),
        f"{row.outcome.warm_s / requests:.2f} s",
        f"{row.ttft_saved:.1%}",
    )
    return _joined(cells).rstrip()


def as_json(trace: Trace, machine: Machine, rows: list[Row]) -> dict[str, Any]:
    """Everything the table shows and what it was made of. An infinite speed is 0, as in the flags."""
    speeds = {name: 0.0 if isinstance(value, float) and math.isinf(value) else value for name, value in asdict(machine).items()}
    facts = {
        "name": trace.name,
        "requests": len(trace.requests),
        "input_tokens": trace.input_tokens,
        "block_tokens": BLOCK_TOKENS,
        "touched_blocks": trace.touched_blocks,
        "distinct_blocks": trace.distinct_blocks,
    }
    return {"trace": facts, "machine": {**speeds, "block_bytes": machine.block_bytes}, "rows": [_row_json(row) for row in rows]}


def _row_json(row: Row) -> dict[str, Any]:
    requests = len(row.trace.requests)
    return {
        **asdict(row.setup),
        "dram_bytes": row.dram_bytes,
        "nvme_bytes": row.nvme_bytes,
        "unlimited": row.unlimited,
        "hit_rate": row.hit_rate,
        "dram_hit_rate": row.dram_hit_rate,
        "nvme_hit_rate": row.nvme_hit_rate,
        "nvme_written_bytes": row.moved_bytes("demoted"),
        "nvme_read_bytes": row.moved_bytes("promoted"),
        "dram_read_bytes": (row.outcome.dram_hit_blocks + row.outcome.nvme_hit_blocks) * row.machine.block_bytes,
        "dram_written_bytes": row.outcome.stored_blocks * row.machine.block_bytes,
        "ttft_cold_s": row.outcome.cold_s / requests,
        "ttft_warm_s": row.outcome.warm_s / requests,
        "ttft_saved": row.ttft_saved,
        "counters": row.outcome.counters,
    }
