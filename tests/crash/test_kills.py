"""A short storm: some fifteen kills. A long one is `python -m tests.crash --kills 300`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.storm import Storm

KILLS = 15
QUICK_S = 30.0  # seconds: a start takes half of one, on a machine that does nothing else


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("daemons_by_command")
def test_killed_at_any_moment_nothing_is_wrong_lost_or_leaked(tmp_path: Path) -> None:
    tally = Storm(tmp_path, seed=1).run(KILLS)
    assert tally.faults == []
    assert tally.kills == KILLS
    assert tally.client_kills >= 10
    assert tally.promises_checked > 1000
    assert tally.blocks_read > 500
    assert tally.clients["read"] > 100
    assert tally.blocks_cleared > 0
    assert tally.slowest_start_s < QUICK_S
