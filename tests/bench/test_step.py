"""A decode step's message, as it is measured, does what a decode step does."""

from __future__ import annotations

from pathlib import Path

from kvstore.bench.step import SEQUENCES, Decoding, step_figures
from kvstore.clients.client import KVClient
from kvstore.testing.daemon import DaemonProcess

STEPS = 5


def test_every_step_commits_a_block_of_each_sequence_and_lets_the_last_one_go(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, dram="16MiB", nvme=False) as daemon, KVClient(daemon.address) as client:
        decoding = Decoding(daemon.address)
        for _ in range(STEPS):
            assert decoding.step_s() > 0
            assert decoding.empty_s() > 0
        stats = client.stats()
        assert stats.counters["committed"] == STEPS * SEQUENCES
        (session,) = stats.sessions
        assert (session.leases, session.reserved_slots) == (SEQUENCES, SEQUENCES)
        decoding.close()


def test_the_figures_are_medians_and_their_ratio(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, dram="64MiB", nvme=False) as daemon:
        figures = step_figures(daemon.address)
    assert figures["step_p50_ms"] > figures["round_trip_p50_ms"] > 0
    assert figures["step_ratio"] > 1
