"""The demo's figures for a person: a table with bars, and where the time of a warm start went."""

from kvstore.cli.demo_measure import COLD, WARM, Figures

BAR_CELLS = 44  # with the text beside it a line stays inside 100 columns
EIGHTHS = " ▏▎▍▌▋▊▉"
TITLES = {
    "plain": "transformers, no store",
    COLD: "cold, filling the store",
    "same_worker": "same worker again",
    "other_worker": "another worker",
    "after_restart": "after kill -9, from disk",
}
# The parts of a first token's time: what each is, how it is drawn, and the timings that it adds up.
PARTS = (
    ("asking the store", "░", ("hash_s", "acquire_s", "reserve_s")),
    ("gathering K and V", "▒", ("gather_s", "write_s")),
    ("computing the rest", "█", ("compute_s", "sample_s")),
)


def picture(figures: Figures) -> str:
    """Everything, as lines of text."""
    return "\n".join([*_table(figures), "", *_parts(figures), "", *_verdict(figures)])


def _table(figures: Figures) -> list[str]:
    longest = max(figures.ttft_ms(kind) for kind in TITLES)
    lines = [f"first token of a prompt of {figures.prompt_tokens:,} tokens"]
    for kind, title in TITLES.items():
        ms = figures.ttft_ms(kind)
        line = f"  {title:<25}{ms:>9,.0f} ms  {_bar(ms / longest)}"
        if kind in WARM:
            line += f" {figures.ttft_ms(COLD) / ms:.0f}× sooner, {figures.hit_tokens(kind):,} tokens from the store"
        lines.append(line)
    return lines


def _parts(figures: Figures) -> list[str]:
    """Bars on one scale for the warm starts: the cold ones would not fit beside them."""
    longest = max(figures.ttft_ms(kind) for kind in WARM)
    lines = ["where the time of a warm start went: " + ", ".join(f"{glyph} {what}" for what, glyph, _ in PARTS)]
    for kind in WARM:
        sizes = [sum(figures.part_ms(kind, name) for name in names) for _, _, names in PARTS]
        bar = "".join(glyph * round(size / longest * BAR_CELLS) for size, (_, glyph, _) in zip(sizes, PARTS, strict=True))
        numbers = " + ".join(f"{size:.1f}" for size in sizes)
        lines.append(f"  {TITLES[kind]:<25}{figures.ttft_ms(kind):>9,.0f} ms  {bar:<{BAR_CELLS}} {numbers} ms")
    return lines


def _verdict(figures: Figures) -> list[str]:
    ratio = figures.ttft_ms(COLD) / figures.ttft_ms("plain")
    same = "identical to transformers without the store" if figures.identical() else "NOT IDENTICAL to transformers: please report this"
    return [f"filling the store: {ratio:.2f} × the time without it", f"output: {same}, to the last bit at the same split point"]


def _bar(share: float) -> str:
    cells = share * BAR_CELLS
    whole = int(cells)
    part = EIGHTHS[int((cells - whole) * 8)].strip()
    return "█" * whole + part
