"""The figures of a load: throughput, waiting, and who was overtaken by whom; and their tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvstore.bench.load.measure import OURS, Result
from kvstore.bench.load.prompts import Asked
from kvstore.worker.scheduler import ACQUIRE_TIMEOUT_S, AGE_S

TARGETS = {"transformers": 1.0, "transformers-unshared": 2.0}  # times: of each one's throughput that ours is meant to reach
RULE = f"""TTFT and queued count from a request's arrival. No request starves, however long the queue: it is let in at the latest when as
many have been as came up to {AGE_S:g} s after it; later only by a wait of its own, for its blocks to come (at most {ACQUIRE_TIMEOUT_S:g} s)
or for another that is computing them. `late` is the longest of these that was seen."""
HEAD = (
    f"{'':<22} {'tokens/s':>9} {'made/s':>7} {'TTFT s':>15} {'ms a token':>15} {'queued s':>15} {'late s':>7} {'put off':>7} {'hits':>8}",
    f"{'':<22} {'':>9} {'':>7}" + f" {'p50':>7} {'p99':>7}" * 3,
)


def figures_of(result: Result, asked: Sequence[Asked]) -> dict[str, Any]:
    """One engine's figures; seconds and milliseconds, tokens a second."""
    answers = result.answers
    ends_s = [answer["token_at_s"][-1] for answer in answers]
    first_s = [answer["token_at_s"][0] - each.at_s for answer, each in zip(answers, asked, strict=True)]
    queued_s = [max(0.0, answer["started_at_s"] - each.at_s) for answer, each in zip(answers, asked, strict=True)]
    between_s = [
        (answer["token_at_s"][-1] - answer["token_at_s"][0]) / (len(answer["token_at_s"]) - 1)
        for answer in answers
        if len(answer["token_at_s"]) > 1
    ]
    took_s = max(ends_s) - asked[0].at_s
    made = sum(len(answer["tokens"]) for answer in answers)
    came_s, started_s = [each.at_s for each in asked], [answer["started_at_s"] for answer in answers]
    allowed_s = [max(0.0, due - came) for due, came in zip(due_s(came_s, started_s), came_s, strict=True)]
    return {
        "took_s": took_s,
        "tokens_per_s": (sum(len(each.tokens) for each in asked) + made) / took_s,
        "made_tokens_per_s": made / took_s,
        **_percentiles("ttft_s", first_s),
        **_percentiles("per_token_s", between_s),
        **_percentiles("queued_s", queued_s),
        **_percentiles("allowed_s", allowed_s),
        "late_s": late_s(came_s, started_s),
        "prompt_tokens": sum(len(each.tokens) for each in asked),
        "made_tokens": made,
        **result.figures,
    }


def late_s(came_at_s: Sequence[float], started_at_s: Sequence[float], age_s: float = AGE_S) -> float:
    """The most that a request was let in later than the engine's rule says; 0 where it never was.

    The rule: nobody is passed by those that come more than `age_s` later. So a request is let in at the latest when as many have been as
    came up to `age_s` after it. What comes on top is a wait of its own, for its blocks or for another that is computing them.
    """
    due = due_s(came_at_s, started_at_s, age_s)
    return max(0.0, *(started - latest for started, latest in zip(started_at_s, due, strict=True)))


def due_s(came_at_s: Sequence[float], started_at_s: Sequence[float], age_s: float = AGE_S) -> list[float]:
    """When the rule (see `late_s`) lets each request in at the latest, given how fast requests were let in."""
    starts = sorted(started_at_s)
    return [starts[sum(other <= came + age_s for other in came_at_s) - 1] for came in came_at_s]


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{name}_p50": percentile(values, 50), f"{name}_p99": percentile(values, 99)} if values else {}


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value that so many of a hundred do not pass (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def report(results: Sequence[Result], asked: Sequence[Asked]) -> dict[str, Any]:
    """All engines' figures by name, with `reason` where there are none, and how ours compares."""
    engines: dict[str, Any] = {}
    for result in results:
        figures = figures_of(result, asked) if result.answers and not result.reason else {"reason": result.reason or "it gave no answers"}
        engines[result.name] = {**result.about, **figures}
    ours = engines.get(OURS, {}).get("tokens_per_s")
    times = {name: ours / each["tokens_per_s"] for name, each in engines.items() if ours and name != OURS and "tokens_per_s" in each}
    return {"engines": engines, "throughput_ratio": times, "targets": TARGETS, "same_first_token": _agreement(results)}


def _agreement(results: Sequence[Result]) -> dict[str, float]:
    """The share of requests whose first token is that of ours. In 16 bits not all are: two close logits may change places."""
    first = {result.name: [answer["tokens"][:1] for answer in result.answers] for result in results if result.answers and not result.reason}
    ours = first.get(OURS)
    return {name: sum(a == b for a, b in zip(each, ours, strict=True)) / len(ours) for name, each in first.items() if ours and name != OURS}


def show(found: dict[str, Any]) -> str:
    """The tables."""
    lines = [*HEAD, *(_row(name, each) for name, each in found["engines"].items()), ""]
    lines += [f"{OURS} is {ratio:.2f} × {name}{_target(name, ratio)}" for name, ratio in found["throughput_ratio"].items()]
    lines += [f"{share:.0%} of the first tokens of {name} are those of {OURS}" for name, share in found["same_first_token"].items()]
    if "allowed_s_p99" in (ours := found["engines"].get(OURS, {})):
        queued, allowed = ours["queued_s_p99"], ours["allowed_s_p99"]
        lines.append(f"p99 of {OURS}'s queueing: {queued:.2f} s; that of what the rule below allows: {allowed:.2f} s")
    lines.append(RULE)
    return "\n".join(lines)


def _row(name: str, each: dict[str, Any]) -> str:
    if "reason" in each:
        return f"{name:<22} {each['reason']}"
    pairs = [
        (each.get(f"{what}_p50"), each.get(f"{what}_p99"), scale) for what, scale in (("ttft_s", 1), ("per_token_s", 1e3), ("queued_s", 1))
    ]
    times = "".join(
        f" {p50 * scale:>7.2f} {p99 * scale:>7.2f}" if p50 is not None and p99 is not None else f" {'-':>15}" for p50, p99, scale in pairs
    )
    counts = f"{each['late_s']:>7.2f} {each['preemptions']:>7.0f} {each['hit_tokens']:>8.0f}"
    return f"{name:<22} {each['tokens_per_s']:>9.0f} {each['made_tokens_per_s']:>7.1f}{times} {counts}"


def _target(name: str, ratio: float) -> str:
    return f" (≥ {TARGETS[name]:g}{'' if ratio >= TARGETS[name] else ': missed'})" if name in TARGETS else ""
