"""A short siege: some ten thousand messages. A long one is `python -m tests.hostile --messages 1000000`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile import siege

MESSAGES = 10_000
MOST_GROWTH_BYTES = 16 << 20  # 16 MiB: arrays that are touched for the first time, and what allocators keep
SLOWEST_S = 10.0  # seconds for a round of the bystander's five calls, on a machine that does other things


@pytest.mark.timeout(400)
def test_besieged_the_daemon_lives_keeps_its_size_and_serves_the_others(tmp_path: Path) -> None:
    outcome = siege.run(tmp_path, MESSAGES, seed=1)
    assert outcome.faults == []
    assert outcome.messages >= MESSAGES
    assert outcome.bystander_rounds > 50
    assert outcome.bystander_read_share > 0.9
    assert outcome.bystander_slowest_s < SLOWEST_S
    assert outcome.resident_bytes[-1] - outcome.resident_bytes[1] < MOST_GROWTH_BYTES
    calls = ("OpenNamespace", "JoinGroup", "Lookup", "Read", "Write", "Prefetch", "Pin", "Unpin", "Clear", "Stats", "Watch")
    for kind in (*calls, "ListNamespaces", "Explain"):
        assert outcome.statuses[f"{kind} OK"], f"no {kind} was right: it is attacked at its door only"
    for kind in ("stored", "exists", "in_flight", "bad_slot", "bad_key", "limit"):
        assert outcome.statuses[f"op slots {kind}"], f"no slot was answered {kind}"
