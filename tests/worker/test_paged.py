"""What the paged cache takes from a store, gives back, and does when the store does not give."""

import numpy as np
import pytest

from kvstore.clients.blocks import Slots
from kvstore.errors import DeadlineExceeded, EnvironmentFault, ResourceExhausted, Unavailable
from kvstore.hashing import fingerprint
from kvstore.worker.engine import Engine
from kvstore.worker.model import LoadedModel
from kvstore.worker.paged import PagedCache
from kvstore.worker.plain import generate_plain
from kvstore.worker.requests import Finish, Request
from tests.worker.stores import BLOCK_TOKENS, Watched, prompt, small_store

GONE = [Unavailable("the daemon is gone"), DeadlineExceeded("no answer")]


def test_a_hit_copies_no_block(store: Watched, engine: Engine) -> None:
    tokens = prompt(6 * BLOCK_TOKENS + 5)
    engine.generate([Request(tokens, 1)])
    store.committed.clear()
    store.reserved.clear()
    before = store.arena.copy()
    engine.generate([Request(tokens, 1)])
    hit = store.acquired[-1]
    assert len(hit) == 6
    changed = np.flatnonzero(before != store.arena) // store.geometry.slot_bytes * store.geometry.slot_units
    given = [unit for slots in store.reserved for unit in slots.units.tolist()]
    assert set(changed.tolist()) == {given[0]}  # one open block, for the five tokens past the hit
    assert set(given).isdisjoint(hit.units.tolist())
    assert store.committed == []


def test_a_block_is_committed_only_when_all_of_it_is_written(store: Watched, engine: Engine) -> None:
    at_commit: dict[int, bytes] = {}

    def note(slots: Slots, _: bytes) -> None:
        at_commit.update({unit: store.block_bytes(unit) for unit in slots.units.tolist()})

    store.on_commit = note
    engine.generate([Request(prompt(27), 40)])
    assert len(at_commit) == (27 + 40 - 1) // BLOCK_TOKENS
    assert all(store.block_bytes(unit) == written for unit, written in at_commit.items())


def test_a_shorter_grant_is_computed_on_from_where_it_ends(tiny: LoadedModel, store: Watched, engine: Engine) -> None:
    tokens = prompt(50)
    engine.generate([Request(tokens, 1)])
    store.grant_at_most = 3
    done = engine.generate([Request(tokens, 12)])[0]
    assert done.hit_tokens == 3 * BLOCK_TOKENS
    assert done.tokens == generate_plain(tiny, tokens, 12, split=done.hit_tokens).tokens
    assert store.held_bytes == 0


@pytest.mark.parametrize("error", GONE, ids=lambda error: type(error).__name__)
def test_a_store_gone_before_the_prompt_costs_only_the_hit(
    tiny: LoadedModel, store: Watched, engine: Engine, error: EnvironmentFault
) -> None:
    tokens = prompt(50)
    engine.generate([Request(tokens, 1)])
    store.acquire_error = store.reserve_error = error
    done = engine.generate([Request(tokens, 12)])[0]
    assert (done.hit_tokens, done.finish, done.store_fault) == (0, Finish.LENGTH, str(error))
    assert done.tokens == generate_plain(tiny, tokens, 12).tokens
    assert store.held_bytes == 0


@pytest.mark.parametrize("error", GONE, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("reserves", [0, 1, 2])
def test_a_store_gone_in_the_middle_changes_no_answer(
    tiny: LoadedModel, store: Watched, engine: Engine, reserves: int, error: EnvironmentFault
) -> None:
    tokens = prompt(50)
    engine.generate([Request(tokens[:30], 1)])
    store.reserved.clear()
    store.reserve_error, store.reserves_until_error = error, reserves
    done = engine.generate([Request(tokens, 300)])[0]
    assert (done.hit_tokens, done.finish) == (24, Finish.LENGTH)
    assert done.store_fault == str(error)
    assert done.tokens == generate_plain(tiny, tokens, 300, split=24).tokens
    assert store.held_bytes == 0


def test_nothing_is_committed_past_the_first_private_block(store: Watched, engine: Engine) -> None:
    store.reserve_error, store.reserves_until_error = GONE[0], 1
    engine.generate([Request(prompt(20), 200)])
    shared = sum(len(slots) for slots in store.reserved)
    assert store.blocks == sum(len(slots) for slots, _ in store.committed) == shared
    store.reserve_error = None
    assert engine.generate([Request(prompt(20), 1)])[0].hit_tokens == 16


def test_a_store_that_is_back_is_used_again(store: Watched, engine: Engine) -> None:
    store.acquire_error = GONE[0]
    engine.generate([Request(prompt(40), 1)])
    store.acquire_error = None
    engine.generate([Request(prompt(40), 1)])
    assert engine.generate([Request(prompt(40), 1)])[0].hit_tokens == 32


def test_a_prompt_that_does_not_fit_fails_and_leaks_nothing(tiny: LoadedModel) -> None:
    store = small_store(tiny, blocks=5)
    engine = Engine(tiny, store)
    done = engine.generate([Request(prompt(6 * BLOCK_TOKENS), 1), Request(prompt(9, seed=1), 4)])
    assert done[0].finish is Finish.FAILED
    assert isinstance(done[0].error, ResourceExhausted)
    assert done[1].tokens == generate_plain(tiny, prompt(9, seed=1), 4).tokens
    assert store.held_bytes == 0
    engine.close()


def test_a_store_that_fills_up_ends_the_sequence_with_what_it_made(tiny: LoadedModel) -> None:
    store = small_store(tiny, blocks=5)
    engine = Engine(tiny, store)
    tokens = prompt(2 * BLOCK_TOKENS)
    done = engine.generate([Request(tokens, 60)])[0]
    assert isinstance(done.error, ResourceExhausted)
    assert done.tokens == generate_plain(tiny, tokens, 60).tokens[: 3 * BLOCK_TOKENS + 1]
    assert store.held_bytes == 0
    engine.close()


def test_slots_that_come_after_the_end_are_given_back(tiny: LoadedModel, store: Watched) -> None:
    cache = PagedCache(store)
    for _ in range(50):
        sequence = cache.open(prompt(9), fingerprint(tiny.identity))
        sequence.ensure(9 - sequence.computed)
        sequence.advance(9 - sequence.computed)
        for _ in range(6 * BLOCK_TOKENS):
            sequence.ensure(1)
            sequence.append(3)
            sequence.advance(1)
        sequence.close()
    cache.close()
    assert store.held_bytes == 0


def test_closing_the_cache_ends_its_sequences(tiny: LoadedModel, store: Watched) -> None:
    cache = PagedCache(store)
    sequence = cache.open(prompt(30), fingerprint(tiny.identity))
    sequence.ensure(30)
    cache.close()
    sequence.close()
    cache.close()
    assert store.held_bytes == 0


def test_a_copy_of_an_existing_block_stays_readable_until_the_end(tiny: LoadedModel, store: Watched) -> None:
    cache, root = PagedCache(store), fingerprint(tiny.identity)
    first, second = cache.open(prompt(17), root), cache.open(prompt(17), root)
    for sequence in (first, second):
        sequence.ensure(17)
        sequence.advance(17)
    mine = second.table.runs[0].units[:2]
    assert set(mine).isdisjoint(first.table.runs[0].units)
    first.close()
    again = {unit for slots in (store.reserve(64), store.reserve(64)) for unit in slots.units.tolist()}
    assert again.isdisjoint(second.table.runs[0].units)
    second.close()
    cache.close()


def test_a_store_that_grants_too_much_is_not_believed(
    tiny: LoadedModel, store: Watched, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(16)
    engine.generate([Request(tokens, 20)])
    chain = store.committed[0][1] + store.committed[1][1]
    real = store.inner.acquire
    monkeypatch.setattr(store.inner, "acquire", lambda lease, hashes, timeout_s, prompt=None: real(lease, chain, timeout_s, prompt))
    done = engine.generate([Request(tokens, 12)])[0]
    assert done.hit_tokens == 0
    assert done.tokens == generate_plain(tiny, tokens, 12).tokens
