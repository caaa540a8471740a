"""Wrong bytes in the log: a line each, and no flood."""

from __future__ import annotations

import pytest

from kvstore.cache.messages import Corrupted, FoundBy, Tier
from kvstore.daemon.corruption import LINES, STORY_EVENTS, WINDOW_S, CorruptionLog


def corrupted(number: int) -> Corrupted:
    story = "\n".join(f"#{event} commit 1 {event}" for event in range(100))
    return Corrupted(1, number.to_bytes(32, "big"), Tier.NVME, number, FoundBy.READ, quarantine=True, story=story)


def test_each_block_has_a_line_and_the_rest_of_very_many_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    told = CorruptionLog()
    for number in range(3 * LINES):
        told.tell(corrupted(number), 1.0)
    told.look(1.0 + WINDOW_S / 2)
    assert len(caplog.messages) == LINES
    told.look(1.0 + WINDOW_S)
    assert caplog.messages[-1].startswith(f"{2 * LINES} more corrupt blocks")
    told.look(100.0)
    told.tell(corrupted(7), 100.0)
    assert len(caplog.messages) == LINES + 2
    assert corrupted(7).hash.hex() in caplog.messages[-1]
    assert vars(caplog.records[-1])["story"].count(";") == STORY_EVENTS - 1
