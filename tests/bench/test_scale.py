"""How several runs of the same operations become one row of `kvstore bench scale`, and a small run of it."""

from __future__ import annotations

from kvstore.bench.scale import BATCH_BLOCKS, measure, together


def test_a_hiccup_in_one_run_is_no_operation_s_own_time() -> None:
    runs = [
        {"bytes_per_block": 140.0, "times": {"commit": [0.001, 0.060, 0.002], "clear": [0.004]}},
        {"bytes_per_block": 142.0, "times": {"commit": [0.001, 0.001, 0.003], "clear": [0.030]}},
        {"bytes_per_block": 141.0, "times": {"commit": [0.050, 0.001, 0.002], "clear": [0.005]}},
    ]
    row = together(runs)
    assert row["longest_ms_by"] == {"commit": 2.0, "clear": 4.0}
    assert (row["longest_ms"], row["longest_once_ms"], row["bytes_per_block"]) == (4.0, 60.0, 141.0)
    assert row["commit_us_per_block"] == round(1e6 * 0.002 / BATCH_BLOCKS, 3)


def test_two_runs_do_the_same_operations() -> None:
    first, second = measure(3 * BATCH_BLOCKS), measure(3 * BATCH_BLOCKS)
    assert {what: len(times) for what, times in first["times"].items()} == {what: len(times) for what, times in second["times"].items()}
    assert {"reserve", "commit", "release", "lookup", "acquire", "evict", "snapshot", "clear", "detach"} <= set(first["times"])
