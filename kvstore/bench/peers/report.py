"""The figures of a run, for the screen and for a file: medians, spread, and how many times as fast as each peer this store is."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from kvstore.bench.peers.measure import OURS, Result

# How many times as fast as a peer this store is meant to be: (peer, metric) and the least ratio.
TARGETS = {
    ("lmcache", "store_gbps"): 4.0,
    ("lmcache", "retrieve_gbps"): 1.5,
    ("lmcache", "lookup_hit_ms"): 5.0,
    ("lmcache", "lookup_miss_ms"): 5.0,
    ("mooncake", "store_gbps"): 1.2,
    ("mooncake", "retrieve_gbps"): 1.2,
    ("redis", "store_gbps"): 4.0,
    ("redis", "retrieve_gbps"): 4.0,
}
COLUMNS = {
    "store_gbps": "store GB/s",
    "retrieve_gbps": "retrieve GB/s",
    "lookup_hit_ms": "lookup hit ms",
    "lookup_miss_ms": "lookup miss ms",
}


def ratio(metric: str, ours: float, theirs: float) -> float:
    """How many times as fast ours is: of throughputs ours by theirs, of times theirs by ours."""
    return ours / theirs if metric.endswith("_gbps") else theirs / ours


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": round(statistics.median(values), 4), "min": round(min(values), 4), "max": round(max(values), 4)}


def figures(results: Sequence[Result], memcpy: Sequence[float]) -> dict[str, Any]:
    """Everything for the JSON: a row for each, its samples, and the ratios with their targets."""
    rows = [
        {
            "name": each.name,
            **each.about,
            "reason": each.reason,
            "bytes_checked": each.bytes_checked,
            "first_store_gbps": each.first_store_gbps,
            **{metric: spread(values) for metric, values in each.samples.items()},
            "samples": each.by_object,
        }
        for each in results
    ]
    return {"rows": rows, "ratios": _ratios(rows), "memcpy_2_threads_gbps": {**spread(memcpy), "samples": list(memcpy)}}


def _ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ours to each peer's, by metric; `target` is None where none was set."""
    ours = next((row for row in rows if row["name"] == OURS), {})
    return [
        {
            "peer": row["name"],
            "metric": metric,
            "ratio": round(value := ratio(metric, ours[metric]["median"], row[metric]["median"]), 3),
            "target": (target := TARGETS.get((row["name"], metric))),
            "met": None if target is None else value >= target,
        }
        for row in rows
        if row["name"] != OURS
        for metric in COLUMNS
        if metric in row and metric in ours
    ]


def show(found: dict[str, Any]) -> None:
    """Print the tables."""
    print(f"{'':<10}" + "".join(f"{title:>24}" for title in COLUMNS.values()))
    for row in found["rows"]:
        cells = [_cell(row[metric]) if metric in row else "-" for metric in COLUMNS]
        print(f"{row['name']:<10}" + "".join(f"{cell:>24}" for cell in cells))
    print(f"\nmemcpy with two threads: {_cell(found['memcpy_2_threads_gbps'])} GB/s")
    ours = next(row for row in found["rows"] if row["name"] == OURS)
    if "lookup_hit_of_hashes_ms" in ours:
        print(f"{OURS}'s lookup without the hashing of the tokens: hit {_cell(ours['lookup_hit_of_hashes_ms'])} ms")
    print(f"\n{OURS} against each, times as fast (and the target)\n")
    for name in dict.fromkeys(each["peer"] for each in found["ratios"]):
        of_peer = {each["metric"]: each for each in found["ratios"] if each["peer"] == name}
        print(f"{name:<10}" + "".join(f"{_against(of_peer.get(metric)):>24}" for metric in COLUMNS))
    print()
    for row in found["rows"]:
        print(f"{row['name']}: " + (f"{row['version']}; {row['how']}" if "version" in row else "not started"))
        if row["reason"]:
            print(f"    did not run through: {row['reason']}")


def _cell(values: dict[str, Any]) -> str:
    return f"{values['median']:.2f} ({values['min']:.2f}-{values['max']:.2f})"


def _against(each: dict[str, Any] | None) -> str:
    if each is None:
        return "-"
    target = "" if each["target"] is None else f" (>= {each['target']:g}{'' if each['met'] else ', missed'})"
    return f"{each['ratio']:.2f}{target}"
