"""A vLLM whose model has sliding windows beside full attention, with its hybrid cache manager: each kind of layer has blocks of its own.

Prompts are computed 256 tokens a step, so that windows leave blocks behind between the steps, before they are stored.
"""

import os
import signal
from collections.abc import Iterator

import pytest

from kvstore.clients.client import KVClient
from kvstore.testing.daemon import DaemonProcess
from tests.cases.figures import eventually, tier
from tests.engines import models
from tests.engines.engine import Engine, connector
from tests.engines.prompts import BLOCK_TOKENS
from tests.engines.test_vllm_requests import SMALL, fresh, tokens

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TEXT = tokens(4, 700)
BLOCKS = 5
GROUPS = 3
POOL_BLOCKS = 60  # engine blocks, over all groups


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("shared"), dram="128MiB", nvme=False) as process:
        yield process


@pytest.fixture(scope="module")
def engine(shared: DaemonProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("engine")
    transfer = connector(shared.address, "tests.engines.faulty", "FaultyConnector")
    small = {**SMALL, "max_num_batched_tokens": 256, "num_gpu_blocks_override": POOL_BLOCKS}
    with Engine(models.sliding(folder / "model"), folder / "log", transfer, **small) as child:
        yield child


def assert_nothing_is_held(engine: Engine) -> None:
    engine("settle")
    assert engine("usage") == {"blocks": 0.0, "requests": 0, "tracked": 0}


def test_each_kind_of_layer_is_stored_and_a_window_whole(engine: Engine) -> None:
    """Blocks that a window has left behind are stored too, so that a prompt with the same beginning can use them."""
    windows = sorted(group["window_tokens"] for group in engine("facts")["groups"])
    assert windows == [0] + [models.WINDOW - 1] * (GROUPS - 1)
    cold = engine.generate(TEXT, 16)
    assert_nothing_is_held(engine)
    assert [len(engine("stored", prompt=TEXT, group=group)) for group in range(GROUPS)] == [BLOCKS] * GROUPS
    assert engine("reset")
    hit = engine.generate(TEXT, 16)
    assert (hit["cached"], hit["ids"]) == (BLOCKS * BLOCK_TOKENS, cold["ids"])
    for shared in (3 * BLOCK_TOKENS + 5, 4 * BLOCK_TOKENS):
        fresh(engine)
        other = TEXT[:shared] + tokens(5, 300)
        answer = engine.generate(other, 16)
        assert answer["cached"] == shared // BLOCK_TOKENS * BLOCK_TOKENS
        assert answer["ids"] == engine.without_store(other, answer["cached"], 16)


def test_groups_of_other_kinds_are_refused(engine: Engine) -> None:
    refusals = engine("refusals")
    assert "of kind ChunkedLocalAttentionSpec, which is not shared yet" in refusals["chunked"]
    assert "of kind MambaSpec, which is not shared yet" in refusals["states"]
    assert "blocks of different lengths" in refusals["longer"]


def test_answers_depend_on_the_first_block(engine: Engine) -> None:
    """The control: a window does not hide a wrong block at the beginning."""
    assert engine.generate([9] * BLOCK_TOKENS + TEXT[BLOCK_TOKENS:], 16)["ids"] != engine.generate(TEXT, 16)["ids"]


def test_lengths_around_the_end_of_a_block(engine: Engine) -> None:
    for length in (2 * BLOCK_TOKENS - 1, 2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS + 1):
        text = tokens(70, length)
        cold = engine.generate(text)
        fresh(engine)
        hit = engine.generate(text)
        assert (hit["cached"], hit["ids"]) == ((length - 1) // BLOCK_TOKENS * BLOCK_TOKENS, cold["ids"])
        engine("settle")


def test_what_was_decoded_is_found_as_a_prompt(engine: Engine) -> None:
    """An answer longer than a window: its first blocks were left behind before its end."""
    text = tokens(6, 300)
    whole = text + engine.generate(text, 500)["ids"]
    fresh(engine)
    second = engine.generate(whole)
    assert second["cached"] == (len(whole) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert second["ids"] == engine.without_store(whole, second["cached"])


def test_a_load_that_fails_in_one_block_is_computed_from_the_start(engine: Engine) -> None:
    """And every block that the store has afterwards is, byte for byte, that of a run without the failure."""
    text = tokens(8, 700)
    cold = engine.generate(text, 40)
    for bad in (0, 3):
        salt = f"failed-{bad}"
        engine.generate(text[: 4 * BLOCK_TOKENS + 1], 2, salt)
        fresh(engine)
        engine("fail", blocks=[bad])
        answer = engine.generate(text, 40, salt)
        engine("fail", blocks=[])
        engine("settle")
        assert answer["ids"] == cold["ids"]
        for group in range(GROUPS):
            assert engine("stored", prompt=text, salt=salt, group=group) == engine("stored", prompt=text, group=group)


def test_preempted_requests_answer_as_if_they_were_not(engine: Engine) -> None:
    texts = [tokens(20 + each, 3 * BLOCK_TOKENS - 20) for each in range(8)]
    few = [engine("generate", prompts=texts[at : at + 2], max_tokens=150, salts=["few"] * 2) for at in range(0, len(texts), 2)]
    alone = [answer["ids"] for answers in few for answer in answers]
    fresh(engine)
    before = engine("preemptions")
    together = engine("generate", prompts=texts, max_tokens=150)
    assert engine("preemptions") > before
    assert [answer["ids"] for answer in together] == alone
    assert_nothing_is_held(engine)


def test_aborts_at_any_moment_leave_nothing_behind(engine: Engine, shared: DaemonProcess) -> None:
    """Before, during and after loads, of which every third fails."""
    texts = [tokens(100 + each, (1 + each % 4) * BLOCK_TOKENS + 30 + each) for each in range(12)]
    alone = [engine.generate(text, 6)["ids"] for text in texts]
    fresh(engine)
    engine("fail", blocks=[0], every=3, slow_s=0.004)
    ended = engine("storm", prompts=texts, requests=100, seed=5, tokens=6)
    engine("fail", blocks=[])
    assert 10 < len(ended) < 100
    assert all(ids == alone[which] for which, ids in ended)
    assert_nothing_is_held(engine)
    with KVClient(shared.address) as client:
        assert eventually(lambda: tier(client, "dram").held_bytes == 0)
        assert all(session.leases == 0 and session.reserved_slots == 0 for session in client.stats().sessions)


def test_a_daemon_that_hangs_keeps_no_blocks_from_the_engine(engine: Engine, shared: DaemonProcess) -> None:
    """What is held for saves goes back at their deadline, and a reset finds nothing from before."""
    text = tokens(9, 700)
    cold = engine.generate(text, 16)
    engine("settle")
    engine("limit", acquire_timeout_s=0.5, save_timeout_s=1.0)
    os.kill(shared.pid, signal.SIGSTOP)
    try:
        assert engine.generate(text, 16, "another")["ids"] == cold["ids"]
        assert_nothing_is_held(engine)
    finally:
        os.kill(shared.pid, signal.SIGCONT)
    engine("limit", acquire_timeout_s=30.0, save_timeout_s=60.0)
    assert engine("reset", connector=True)
    assert engine.generate(text, 16)["cached"] == 0
    assert_nothing_is_held(engine)
