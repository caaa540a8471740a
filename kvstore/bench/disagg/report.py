"""The figures of each setup, by kind of request, and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvstore.bench.disagg.asking import Heard
from kvstore.bench.load.report import percentile

KINDS = ("talk", "read")
HEAD = (
    f"{'':<12} {'TTFT ms':>17} {'ms a token':>17} {'ms between pieces':>23} {'from the store':>15}",
    f"{'':<12} {'p50':>8} {'p99':>8} {'p50':>8} {'p99':>8} {'p50':>11} {'p99':>11} {'tokens':>15}",
)


def figures_of(heard: Sequence[Heard]) -> dict[str, Any]:
    """One setup's: seconds. `between_s` are the pauses that whoever reads along sees, of all texts together."""
    by_kind = {kind: _of_kind([each for each in heard if each.asked.kind == kind]) for kind in KINDS}
    return {"took_s": max(each.pieces_at_s[-1] for each in heard), **by_kind}


def _of_kind(heard: Sequence[Heard]) -> dict[str, Any]:
    first_s = [each.pieces_at_s[0] - each.asked.at_s for each in heard]
    token_s = [(each.pieces_at_s[-1] - each.pieces_at_s[0]) / (each.made_tokens - 1) for each in heard if each.made_tokens > 1]
    between_s = [
        later - earlier for each in heard for earlier, later in zip(each.pieces_at_s, each.pieces_at_s[1:], strict=False)
    ]
    return {
        "requests": len(heard),
        "prompt_tokens": sum(len(each.asked.tokens) for each in heard),
        "made_tokens": sum(each.made_tokens for each in heard),
        "cached_tokens": sum(each.cached_tokens for each in heard),
        **_both("ttft_s", first_s),
        **_both("per_token_s", token_s),
        **_both("between_s", between_s),
    }


def _both(name: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{name}_p50": percentile(values, 50), f"{name}_p99": percentile(values, 99)} if values else {}


def compare(heard: Mapping[str, Sequence[Heard]]) -> dict[str, Any]:
    """Both setups beside each other: how many times as long `both` takes, and the share of texts that are the same."""
    setups = {name: figures_of(each) for name, each in heard.items()}
    split, both = setups["split"], setups["both"]
    times = {
        kind: {name: both[kind][name] / split[kind][name] for name in split[kind] if name.endswith(("_p50", "_p99")) and split[kind][name]}
        for kind in KINDS
    }
    texts = zip(heard["split"], heard["both"], strict=True)
    same = sum(one.text == other.text for one, other in texts) / len(heard["split"])
    return {"setups": setups, "both_over_split": times, "same_texts": same}


def show(found: dict[str, Any]) -> str:
    """The table."""
    lines = list(HEAD)
    for name, setup in found["setups"].items():
        for kind in KINDS:
            figures = setup[kind]
            numbers = "".join(
                f" {figures.get(f'{what}_p50', 0) * 1e3:>{width}.1f} {figures.get(f'{what}_p99', 0) * 1e3:>{width}.1f}"
                for what, width in (("ttft_s", 8), ("per_token_s", 8), ("between_s", 11))
            )
            lines.append(f"{name + ' ' + kind:<12}{numbers} {figures['cached_tokens']:>15}")
    lines.append("")
    lines += [
        f"{kind}: with two workers for both the first token's p99 is {times['ttft_s_p99']:.2f} times, a token's p50 "
        f"{times['per_token_s_p50']:.2f} times, the pauses' p99 {times['between_s_p99']:.2f} times that of split roles"
        for kind, times in found["both_over_split"].items()
        if {"ttft_s_p99", "per_token_s_p50", "between_s_p99"} <= set(times)
    ]
    took = ", ".join(f"{name} {setup['took_s']:.1f} s" for name, setup in found["setups"].items())
    lines.append(f"the whole load took: {took}; {found['same_texts']:.0%} of the texts are the same in both")
    return "\n".join(lines)
