"""What happens to single requests in a vLLM with the store: salts, aborts, preemption, failed loads, a reset. A small random model.

In 32-bit floats, so that an answer does not depend on what else is computed beside it.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.clients.client import KVClient
from kvstore.geometry import Geometry
from kvstore.hashing import Identity
from kvstore.testing.daemon import DaemonProcess
from tests.cases.figures import eventually, tier
from tests.engines import models
from tests.engines.engine import Engine, connector
from tests.engines.prompts import BLOCK_TOKENS, prompt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SMALL: dict[str, object] = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 2048}
POOL_BLOCKS = 24  # engine blocks: six requests of four do not fit with what else is kept


def tokens(seed: int, count: int) -> list[int]:
    return prompt(seed, count, models.VOCABULARY)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("shared"), dram="128MiB", nvme=False) as process:
        yield process


@pytest.fixture(scope="module")
def engine(shared: DaemonProcess, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine whose loads can be made to fail, and which has room for few requests at once."""
    transfer = connector(shared.address, "tests.engines.faulty", "FaultyConnector")
    log = tmp_path_factory.mktemp("log") / "engine.log"
    with Engine(llama, log, transfer, num_gpu_blocks_override=POOL_BLOCKS, **SMALL) as child:
        yield child


def fresh(engine: Engine) -> None:
    """Nothing runs, and the engine's own cache is empty."""
    engine("settle")
    assert engine("reset")


def test_settings_under_which_it_cannot_work_are_refused(engine: Engine) -> None:
    """The connector is also found by its name alone. Made, it has opened nothing yet: grpc does not survive a fork."""
    assert engine("construct") == ""
    assert "kv_load_failure_policy is 'fail': set it to 'recompute'" in engine("construct", kv_load_failure_policy="fail")
    assert "set it to 'kv_both'" in engine("construct", kv_role="kv_producer")
    assert "'adress' is unknown" in engine("construct", kv_connector_extra_config={"adress": "x"})


def test_salts_do_not_see_each_other(engine: Engine) -> None:
    """Case 14 of a kind: two salts in turn never hit each other's blocks; each hits its own."""
    text = tokens(1, 400)
    first = engine.generate(text, salt="one")
    fresh(engine)
    assert engine.generate(text, salt="two")["cached"] == 0
    fresh(engine)
    assert engine.generate(text)["cached"] == 0
    fresh(engine)
    again = engine.generate(text, salt="one")
    assert (again["cached"], again["ids"]) == (3 * BLOCK_TOKENS, first["ids"])


def test_one_fact_of_the_model_apart_is_another_identity(engine: Engine) -> None:
    """Case 17: other weights, scales, types or positions. What only an engine's own settings say is none of it."""
    roots = engine("identities")
    mine = roots.pop("as it is")
    assert roots.pop("a longer queue") == mine
    assert len({mine, *roots.values()}) == 1 + len(roots) == 9


def test_lengths_around_the_end_of_a_block(engine: Engine) -> None:
    """Case 12: in 32 bits a hit answers as the run that computed everything."""
    for length in (1, *(blocks * BLOCK_TOKENS + more for blocks in (1, 2) for more in (-1, 0, 1))):
        text = tokens(70 + length, length)
        cold = engine.generate(text)
        fresh(engine)
        hit = engine.generate(text)
        assert (hit["cached"], hit["ids"]) == ((length - 1) // BLOCK_TOKENS * BLOCK_TOKENS, cold["ids"])
        engine("settle")


def test_who_opts_out_of_the_prefix_cache_is_computed(engine: Engine, shared: DaemonProcess) -> None:
    """Case 40, as vLLM does it for a request that asks for its prompt's logprobs too. It holds nothing, and others still hit."""
    text = tokens(8, 3 * BLOCK_TOKENS + 9)
    cold = engine.generate(text)
    fresh(engine)
    answer = engine.generate(text, skip_reading_prefix_cache=True)
    assert (answer["cached"], answer["ids"]) == (0, cold["ids"])
    engine("settle")
    with KVClient(shared.address) as client:
        assert eventually(lambda: all(session.leases == 0 for session in client.stats().sessions))
    fresh(engine)
    assert engine.generate(text)["cached"] == 3 * BLOCK_TOKENS


def test_what_was_decoded_is_found_as_a_prompt(engine: Engine) -> None:
    """A conversation's second turn: the first one's answer is stored as it grows, block by block."""
    text = tokens(2, 200)
    answer = engine.generate(text, 200)["ids"]
    fresh(engine)
    whole = text + answer
    second = engine.generate(whole)
    assert second["cached"] == (len(whole) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert second["ids"] == engine.without_store(whole, second["cached"])


def test_what_was_done_is_counted_on_the_metrics_page(engine: Engine) -> None:
    """Blocks stored, found there already, loaded, and failed, under vLLM's own names."""
    text = tokens(7, 3 * BLOCK_TOKENS + 9)

    def counted() -> dict[str, float]:
        """Of a run of the prompt from a fresh cache."""
        fresh(engine)
        before = engine("stats")
        engine.generate(text, 2)
        engine("settle")
        time.sleep(1.5)  # far beyond what it takes: a save counts once it is committed, and is told with the next step
        engine.generate(text[:5], 3)
        after: dict[str, float] = engine("stats")
        grown = {name.removeprefix("vllm:kvstore_"): count - before.get(name, 0) for name, count in after.items()}
        return {name: count for name, count in grown.items() if count}

    assert counted() == {"stored_blocks_total": 3}
    again = counted()
    assert again.pop("load_seconds_total") > 0
    assert again == {"loaded_blocks_total": 3}
    engine("fail", blocks=[2])
    failed = counted()
    engine("fail", blocks=[])
    assert failed.pop("load_seconds_total") > 0
    assert failed == {"loaded_blocks_total": 2, "failed_blocks_total": 1, "known_blocks_total": 3}


def test_a_failed_load_is_computed_and_stores_nothing_wrong(engine: Engine) -> None:
    """The answer is right, and every block that the store has afterwards is, byte for byte, that of a run without the failure."""
    text = tokens(3, 5 * BLOCK_TOKENS + 60)
    engine.generate(text[: 2 * BLOCK_TOKENS + 1], 2)
    engine("settle")
    head = engine("stored", prompt=text)
    assert len(head) == 2
    for bad in ([0], [1]):
        salt = f"failed-{bad[0]}"
        engine.generate(text[: 2 * BLOCK_TOKENS + 1], 2, salt)
        fresh(engine)
        engine("fail", blocks=bad)
        answer = engine.generate(text, 40, salt)
        engine("fail", blocks=[])
        engine("settle")
        good = bad[0] * BLOCK_TOKENS
        assert answer["ids"] == engine.without_store(text, good, 40)
        stored = engine("stored", prompt=text, salt=salt)
        assert len(stored) == 5
        fresh(engine)
        if good:
            engine.generate(text[: good + 1], 1, "clean")
        engine.generate(text, 40, "clean")
        engine("settle")
        assert engine("stored", prompt=text, salt="clean")[2:] == stored[2:]
        assert stored[:2] == head


def test_preempted_requests_answer_as_if_they_were_not(engine: Engine) -> None:
    """Requests that outgrow the engine's memory are put off and begin again, from the store where it has their blocks."""
    texts = [tokens(20 + each, 3 * BLOCK_TOKENS - 20) for each in range(7)]
    alone = [engine.generate(text, 2 * BLOCK_TOKENS, salt=f"alone-{at}")["ids"] for at, text in enumerate(texts)]
    fresh(engine)
    before = engine("preemptions")
    together = engine("generate", prompts=texts, max_tokens=2 * BLOCK_TOKENS)
    assert engine("preemptions") > before
    assert [answer["ids"] for answer in together] == alone
    fresh(engine)
    hits = [engine.generate(text) for text in texts]
    assert all(hit["cached"] == 2 * BLOCK_TOKENS for hit in hits)


def test_aborts_at_any_moment_leave_nothing_behind(engine: Engine, shared: DaemonProcess) -> None:
    """Of 200 requests most are aborted, at random steps, before, during and after loads, which are slow and of which every third fails: no
    block of the engine stays held, no lease and no slot of the store; and who was not aborted has its own answer."""
    texts = [tokens(100 + each, (1 + each % 3) * BLOCK_TOKENS + 30 + each) for each in range(18)]
    alone = [engine.generate(text, 6)["ids"] for text in texts]
    fresh(engine)
    before = engine("stats")
    engine("fail", blocks=[0], every=3, slow_s=0.004)
    ended = engine("storm", prompts=texts, requests=200, seed=5, tokens=6)
    engine("fail", blocks=[])
    assert 20 < len(ended) < 200
    assert all(ids == alone[which] for which, ids in ended)
    engine("settle")
    assert engine("usage") == {"blocks": 0.0, "requests": 0, "tracked": 0}
    grown = {name: count - before.get(name, 0) for name, count in engine("stats").items()}
    assert grown["vllm:kvstore_loaded_blocks_total"] > 20
    assert grown["vllm:kvstore_failed_blocks_total"] > 5
    with KVClient(shared.address) as client:
        assert eventually(lambda: tier(client, "dram").held_bytes == 0)
        assert all(session.leases == 0 and session.reserved_slots == 0 for session in client.stats().sessions)


def test_a_reset_of_the_connector_finds_nothing_from_before(engine: Engine, shared: DaemonProcess) -> None:
    """Weights may have been changed in place: what was stored before is another model's. The daemon need keep no namespace for each."""
    text = tokens(6, 300)
    engine.generate(text)
    fresh(engine)
    assert engine.generate(text)["cached"] == 2 * BLOCK_TOKENS
    opened = []
    for name in ("before", "after"):
        engine("settle")
        assert engine("reset", connector=True)
        assert engine.generate(text)["cached"] == 0
        fresh(engine)
        assert engine.generate(text)["cached"] == 2 * BLOCK_TOKENS
        with KVClient(shared.address) as client:
            opened.append(client.open_namespace(Identity(model=name), Geometry("mha", 1, 1, 16, 16, "float32", 16)).id)
    assert opened[1] == opened[0] + 1
