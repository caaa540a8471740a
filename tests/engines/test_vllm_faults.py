"""A vLLM whose daemon is stopped, killed, or has a disk that hangs or is slow: its answers stay right, no request waits for long."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from kvstore.clients.client import KVClient
from tests.cases.figures import eventually, settled, tier
from tests.daemon.faulty import FaultyDaemon
from tests.engines.engine import Engine, connector
from tests.engines.prompts import prompt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
PROMPT = prompt(11, 600)
BLOCKS = 4
PATIENCE_S = 1.0  # seconds: acquire_timeout_s of the engine under test
LIMITS: dict[str, Any] = {"acquire_timeout_s": PATIENCE_S, "save_timeout_s": 5.0}
COMPUTING_S = 10.0  # seconds: far more than the prompt's own time on a loaded machine; the daemon's own timeouts are longer


def timed(engine: Engine) -> tuple[dict[str, object], float]:
    """The answer to the prompt from a fresh cache, and how long it took."""
    engine("settle")
    assert engine("reset")
    began_at = time.monotonic()
    return engine.generate(PROMPT), time.monotonic() - began_at


def test_answers_stay_right_whatever_happens_to_the_daemon(tmp_path: Path, model: Path) -> None:
    with (
        FaultyDaemon(tmp_path, dram="128MiB", nvme_bytes="256MiB") as daemon,
        Engine(model, tmp_path / "engine.log", connector(daemon.address, **LIMITS)) as engine,
    ):
        cold = engine.without_store(PROMPT, 0)
        warm = engine.without_store(PROMPT, BLOCKS * 128)
        engine.generate(PROMPT)
        engine("settle")
        with KVClient(daemon.address) as client:
            assert settled(client)
            assert eventually(lambda: tier(client, "nvme").blocks >= BLOCKS)
        answer = timed(engine)[0]
        assert (answer["cached"], answer["ids"]) == (BLOCKS * 128, warm)
        _stopped(engine, daemon, cold)
        _killed(engine, daemon, cold, warm)
        for disk in ("stuck", "slow 5"):  # for good, or for five seconds a read
            _over_a_sick_disk(engine, daemon, disk, cold, warm)


def _stopped(engine: Engine, daemon: FaultyDaemon, cold: list[int]) -> None:
    os.kill(daemon.pid, signal.SIGSTOP)
    answer, took_s = timed(engine)
    settled_s = engine("settle")
    os.kill(daemon.pid, signal.SIGCONT)
    assert (answer["cached"], answer["ids"]) == (0, cold)
    assert took_s < PATIENCE_S + COMPUTING_S
    assert settled_s < 7  # save_timeout_s and a little: then the blocks are the engine's again
    assert engine("usage")["requests"] == 0


def _killed(engine: Engine, daemon: FaultyDaemon, cold: list[int], warm: list[int]) -> None:
    daemon.kill9()
    answer, took_s = timed(engine)
    assert (answer["cached"], answer["ids"]) == (0, cold)
    assert took_s < PATIENCE_S + COMPUTING_S
    daemon.start()
    assert eventually(lambda: timed(engine)[0]["cached"] == BLOCKS * 128, 30)
    assert timed(engine)[0]["ids"] == warm


def _over_a_sick_disk(engine: Engine, daemon: FaultyDaemon, disk: str, cold: list[int], warm: list[int]) -> None:
    with KVClient(daemon.address) as client:
        assert settled(client)
    daemon.restart()
    daemon.fault(disk, "read")
    time.sleep(2)  # the engine attaches again meanwhile
    engine.generate(prompt(12, 200), 1)
    answer, took_s = timed(engine)
    daemon.heal()
    assert (answer["cached"], answer["ids"]) == (0, cold)
    assert took_s < PATIENCE_S + COMPUTING_S
    assert eventually(lambda: timed(engine)[0]["cached"] == BLOCKS * 128, 30)
    assert timed(engine)[0]["ids"] == warm
