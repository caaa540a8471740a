"""Long random walks over the state machine's operations: rarer states than short examples reach. A failing seed replays exactly."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from kvstore.cache.messages import FoundBy, Tier, TransferResult
from tests.cache.test_machine import CacheMachine

SEEDS = 60  # walks; each some 0.2 s
STEPS = 250  # operations a walk

Step = Callable[[CacheMachine, random.Random], None]


def seed(r: random.Random) -> int:
    return r.randrange(1 << 20)


def path(r: random.Random) -> tuple[int, ...]:
    return tuple(r.randrange(2) for _ in range(r.randint(1, 5)))


def namespace(r: random.Random) -> int:
    return r.choice([1, 1, 2, 3])


def finish(m: CacheMachine, r: random.Random) -> None:
    if m.world.pending:
        m.finish_transfer(seed(r), r.choice([TransferResult.OK] * 9 + list(TransferResult)))


def attach(m: CacheMachine, r: random.Random) -> None:
    if len(m.world.clients) < 4:
        guarantee, limit = r.choice([0, 0, 2, 4]), r.choice([0, 0, 3, 8])
        m.attach(guarantee, limit)


def put_both(m: CacheMachine, r: random.Random) -> None:
    """The same chain for both members of the group."""
    who, chosen = seed(r), path(r)
    for member in (1, 3):
        m.put(who, member, chosen, 8, keep=False)


WALK: list[tuple[int, Step]] = [
    (3, attach),
    (1, lambda m, r: m.detach(4 * seed(r))),
    (1, lambda m, r: m.lose(2 * seed(r))),
    (2, lambda m, r: m.after_the_end(seed(r), r.random() < 0.5)),
    (2, lambda m, r: m.join(seed(r))),
    (4, lambda m, r: m.reserve(seed(r), namespace(r), r.randint(1, 4))),
    (4, lambda m, r: m.reserve_named(seed(r), namespace(r), path(r))),
    (8, lambda m, r: m.commit(seed(r), path(r), r.randint(1, 6), r.random() < 0.5)),
    (5, lambda m, r: m.abandon(seed(r))),
    (10, lambda m, r: m.put(seed(r), namespace(r), path(r), r.randint(1, 6), r.random() < 0.2)),
    (6, put_both),
    (8, lambda m, r: m.flood(seed(r), namespace(r), r.randint(2, 40), r.randint(1, 8))),
    (14, lambda m, r: m.acquire(seed(r), namespace(r), path(r), r.randint(1, 6), r.random() < 0.4, r.uniform(0.1, 5))),
    (4, lambda m, r: m.claim(seed(r), seed(r))),
    (14, lambda m, r: m.release(seed(r), r.choice([0, 0, 0, 1, 2]))),
    (2, lambda m, r: m.lookup_changes_nothing(namespace(r), path(r))),
    (6, lambda m, r: m.pull_writes(r.randint(1, 4))),
    (4, lambda m, r: m.pull_sums(r.randint(1, 4))),
    (4, lambda m, r: m.pull_scrubs(r.randint(1, 4))),
    (3, lambda m, r: m.rot(seed(r), r.choice([Tier.DRAM, Tier.DRAM, Tier.NVME]))),
    (20, finish),
    (4, lambda m, r: m.write_all()),
    (6, lambda m, r: m.time_passes(r.uniform(0.05, 3))),
    (2, lambda m, r: m.prefetch(namespace(r), path(r))),
    (2, lambda m, r: m.pin(namespace(r), path(r), r.random() < 0.5)),
    (1, lambda m, r: m.clear(seed(r), namespace(r))),
]

reached: Counter[str] = Counter()


@pytest.mark.parametrize("number", range(SEEDS))
def test_all_rules_hold_on_a_long_walk(number: int) -> None:
    machine = CacheMachine()
    walk(machine, number, STEPS)
    reached.update(machine.cache.stats().counters)
    machine.teardown()


def walk(machine: CacheMachine, number: int, count: int) -> None:
    """`count` steps chosen by `number`; all rules are checked after each."""
    r = random.Random(number)
    machine.build(r.choice(["through", "through", "on_evict", "off"]), r.random() < 0.85, r.choice(["transfer", "read"]))
    steps, weights = [step for _, step in WALK], [weight for weight, _ in WALK]
    for step in r.choices(steps, weights, k=count):
        if not any(not client.ended for client in machine.world.clients.values()):
            attach(machine, r)
        step(machine, r)
        machine.world.step()


def test_the_walks_reach_what_they_are_for() -> None:
    """Runs after them: every kind of event has happened."""
    wanted = ["committed", "demoted", "promoted", "evicted_dram", "evicted_nvme", "corrupt_blocks", "unreadable_blocks", "failed_writes"]
    wanted += ["failed_deletes", "acquire_deadlines", "no_room", "cleared", "sessions_lost", "extents_reassigned", "dropped_before_written"]
    wanted += ["verified", "failed_verifies", "failed_scrubs", "scrubbed_bytes"]
    wanted += [f"corrupt_found_by_{found_by}" for found_by in FoundBy]
    if not reached:
        pytest.fail("the walks were not run; run the whole file")
    assert [name for name in wanted if not reached[name]] == []
