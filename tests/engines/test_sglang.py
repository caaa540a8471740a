"""SGLang's storage backend over a real daemon, driven by the engine's own controller, on the engine's own host pools."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs SGLang: make test-sglang makes a venv that has it", allow_module_level=True)

from kvstore.clients.client import KVClient
from kvstore.clients.patience import AWAY_S
from kvstore.testing.daemon import DaemonProcess
from tests.engines.hf import until_on_disk
from tests.engines.pools import (
    PAGE,
    back_up,
    backend,
    controller,
    file_backend,
    indices,
    keys,
    latent_pool,
    page_bytes,
    pool,
    prefetch,
)

KINDS: list[tuple[Any, str]] = [(pool, layout) for layout in ("page_first", "layer_first", "page_first_direct", "page_head")]
KINDS += [(latent_pool, layout) for layout in ("page_first", "layer_first", "page_first_direct")]
WRITTEN, READ = (1, 3, 5, 7, 2), (0, 2, 4, 6, 8)  # pages of a pool: those that are stored, and those that they are read into


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess() as process:
        yield process


@pytest.fixture
def made(daemon: DaemonProcess, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Makes backends under facts of their own, and closes them."""
    everyone: list[Any] = []

    def make(host_pool: Any, zero_copy: bool = True, **facts: Any) -> Any:
        extra = {"interface_v1": 1} if zero_copy else {}
        everyone.append(backend(daemon.address, host_pool, {"revision": request.node.name} | extra | facts.pop("extra", {}), **facts))
        return everyone[-1]

    yield make
    for each in everyone:
        each.close()


@pytest.mark.parametrize("zero_copy", [True, False])
@pytest.mark.parametrize(("kind", "layout"), KINDS)
def test_another_engine_reads_the_bytes_that_were_written(made: Any, kind: Any, layout: str, zero_copy: bool) -> None:
    source, target = kind(layout, seed=1), kind(layout)
    written, hashes = indices(*WRITTEN), keys(len(WRITTEN))
    assert back_up(controller(made(source, zero_copy), source, zero_copy=zero_copy), hashes, written) == len(WRITTEN) * PAGE
    reader = made(target, zero_copy)
    assert reader.batch_exists([*hashes, "missing"]) == len(hashes)
    assert prefetch(controller(reader, target, zero_copy=zero_copy), hashes, indices(*READ)) == len(READ)
    assert [page_bytes(target, page) for page in READ] == [page_bytes(source, page) for page in WRITTEN]
    assert not any(any(page_bytes(target, page)) for page in range(16) if page not in READ)


@pytest.mark.parametrize(("kind", "layout"), KINDS)
def test_round_trips_are_those_of_the_engine_s_own_backend(made: Any, tmp_path: Path, kind: Any, layout: str) -> None:
    source, hashes = kind(layout, seed=2), keys(4)
    pages = [source.get_data_page(page * PAGE) for page in range(4)]
    found: list[Any] = []
    for storage in (made(source, zero_copy=False), file_backend(tmp_path, source)):
        told = [storage.exists(hashes[0]), storage.set(hashes[0], pages[0]), storage.exists(hashes[0])]
        told += [storage.batch_set(hashes[:3], pages[:3]), storage.batch_exists(hashes), storage.batch_set(hashes[:3], pages[:3])]
        got = storage.batch_get(hashes, [source.get_dummy_flat_data_page() for _ in hashes])
        one = storage.get(hashes[2], source.get_dummy_flat_data_page())
        assert storage.get(hashes[3], source.get_dummy_flat_data_page()) is None
        found.append((told, [page if page is None else page.tolist() for page in got], one.tolist()))
    assert str(found[0]) == str(found[1])  # as text, where a NaN equals itself
    assert found[0][0] == [False, True, True, True, 3, True]


def test_a_missing_page_ends_what_is_read(made: Any) -> None:
    source, target, hashes = pool(seed=3), pool(), keys(5)
    storage = made(source)
    assert storage.batch_set_v1([hashes[0], hashes[1], hashes[3]], indices(0, 1, 3)) == [True] * 3
    assert storage.batch_exists(hashes) == 2
    reader = made(target)
    assert reader.batch_get_v1(hashes, indices(*range(5))) == [True, True, False, False, False]
    assert [page_bytes(target, page) for page in (0, 1)] == [page_bytes(source, page) for page in (0, 1)]
    assert not any(page_bytes(target, 2) + page_bytes(target, 3) + page_bytes(target, 4))
    assert prefetch(controller(reader, target, zero_copy=True), hashes, indices(*range(5))) == 2
    assert reader.exists(hashes[3])


def test_a_page_that_somebody_else_is_writing_is_not_reported_stored(made: Any, daemon: DaemonProcess) -> None:
    source, hashes = pool(seed=4), keys(4)
    storage = made(source)
    _, space = storage._opened()
    with KVClient(daemon.address) as other, other.put(space, storage._hashes([hashes[2]])):
        assert storage.batch_set_v1(hashes, indices(*range(4))) == [True, True, False, True]
        assert storage.batch_exists(hashes) == 2
        assert back_up(controller(storage, source, zero_copy=True), hashes, indices(*range(4))) == 0
    assert storage.batch_set_v1(hashes, indices(*range(4))) == [True] * 4
    assert storage.batch_exists(hashes) == 4


def test_what_does_not_fit_is_not_reported_stored(tmp_path: Path) -> None:
    source, target, hashes = pool(seed=5), pool(), keys(16)
    with DaemonProcess(tmp_path, dram="16MiB", nvme=False) as daemon:
        storage = backend(daemon.address, source, {"interface_v1": 1})
        _, space = storage._opened()
        with KVClient(daemon.address) as other, other.put(space, b"".join(bytes([i % 256, i // 256]) * 16 for i in range(8000))) as held:
            assert 16 < len(held.blocks) < 8000
            assert not any(storage.batch_set_v1(hashes, indices(*range(16))))
            assert storage.batch_exists(hashes) == 0
        assert all(storage.batch_set_v1(hashes, indices(*range(16))))
        reader = backend(daemon.address, target, {"interface_v1": 1})
        assert all(reader.batch_get_v1(hashes, indices(*range(16))))
        assert [page_bytes(target, page) for page in range(16)] == [page_bytes(source, page) for page in range(16)]
        storage.close()
        reader.close()


def test_pages_survive_a_daemon_that_is_killed(made: Any, daemon: DaemonProcess) -> None:
    source, target, hashes = pool(seed=6), pool(), keys(6)
    storage = made(source)
    assert all(storage.batch_set_v1(hashes, indices(*range(6))))
    until_on_disk(daemon)
    daemon.restart()
    reader = made(target)
    assert reader.batch_get_v1(hashes, indices(*range(6))) == [True] * 6
    assert [page_bytes(target, page) for page in range(6)] == [page_bytes(source, page) for page in range(6)]
    assert storage.batch_exists(hashes) == 6


def test_without_a_daemon_everything_is_a_miss_and_nothing_raises(made: Any, daemon: DaemonProcess) -> None:
    source, hashes = pool(seed=7), keys(3)
    storage, flat = made(source), made(source, zero_copy=False)
    page = source.get_data_page(0)
    assert all(storage.batch_set_v1(hashes, indices(0, 1, 2)))
    daemon.kill9()
    for _ in range(2):
        assert storage.batch_exists(hashes) == 0
        assert storage.batch_get_v1(hashes, indices(0, 1, 2)) == [False] * 3
        assert storage.batch_set_v1(hashes, indices(0, 1, 2)) == [False] * 3
        assert flat.batch_get(hashes, [page.clone()] * 3) == [None] * 3
        assert flat.batch_set(hashes, [page] * 3) is False
        assert (flat.exists(hashes[0]), flat.get(hashes[0], page.clone()), flat.set(hashes[0], page)) == (False, None, False)
    daemon.start()
    threading.Event().wait(AWAY_S)
    assert storage.batch_set_v1(hashes, indices(0, 1, 2)) == [True] * 3
    assert storage.batch_exists(hashes) == 3


def test_the_engine_s_own_injected_failures_lose_pages_and_change_none(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.4")
    source, target, hashes = pool(seed=8), pool(), keys(8)
    storage, reader = made(source), made(target)
    wrote = [page for page in range(8) for _ in range(3) if storage.batch_set_v1([hashes[page]], indices(page)) == [True]]
    loaded = [page for page in range(8) if reader.batch_get_v1([hashes[page]], indices(page)) == [True]]
    assert 0 < len(wrote) < 24
    assert set(loaded) <= set(wrote)
    assert all(page_bytes(target, page) == page_bytes(source, page) for page in loaded)


def test_threads_get_their_own_pages(made: Any) -> None:
    wrong: list[str] = []

    def work(number: int) -> None:
        source, target = pool(seed=100 + number), pool()
        storage, reader, hashes = made(source), made(target), keys(16, str(number))
        for first in range(0, 16, 4):
            pages = range(first, first + 4)
            told = storage.batch_set_v1(hashes[first : first + 4], indices(*pages))
            told += reader.batch_get_v1(hashes[first : first + 4], indices(*pages))
            if not all(told) or any(page_bytes(target, page) != page_bytes(source, page) for page in pages):
                wrong.append(f"{number}: {told}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_clearing_clears_every_tier_for_everybody(made: Any, daemon: DaemonProcess) -> None:
    source, hashes = pool(seed=9), keys(3)
    storage, other = made(source), made(source)
    assert all(storage.batch_set_v1(hashes, indices(0, 1, 2)))
    until_on_disk(daemon)
    storage.clear()
    assert other.batch_exists(hashes) == 0
    daemon.restart()
    assert other.batch_exists(hashes) == 0


def test_prefixes_are_evicted_last_where_the_engine_names_them(made: Any, daemon: DaemonProcess) -> None:
    source, hashes = pool(seed=10), keys(4)
    storage = made(source)
    engine = controller(storage, source, zero_copy=True)
    assert back_up(engine, hashes[:2], indices(0, 1), prefix_keys=[]) == 2 * PAGE
    assert back_up(engine, hashes[2:], indices(2, 3), prefix_keys=hashes[:2]) == 2 * PAGE
    with KVClient(daemon.address) as client:
        client_space = client.open_namespace(storage._facts.identity, storage._facts.geometry)
        watched: dict[bytes, bytes] = {}
        for event in client.watch(client_space):
            for at in range(0, len(event.hashes), 32):
                watched[event.hashes[at : at + 32]] = event.parents[at : at + 32]
            if event.kind == "snapshot_end":
                break
    names = [storage._hashes([each]) for each in hashes]
    assert [watched[name] for name in names] == [client_space.root, *names[:3]]


def test_wrong_calls_store_nothing_and_raise_nothing(made: Any) -> None:
    source, hashes = pool(seed=11), keys(2)
    storage, flat = made(source), made(source, zero_copy=False)
    page = source.get_data_page(0)
    assert storage.batch_set_v1(hashes, indices(0)) == [False, False]
    assert storage.batch_set(hashes, [page, page]) is False
    assert flat.batch_set_v1(hashes, indices(0, 1)) == [False, False]
    assert flat.batch_set(hashes, [page]) is False
    assert flat.batch_set(hashes, [page[:-1], page]) is False
    assert flat.get(hashes[0], torch.zeros(3)) is None
    assert (storage.batch_exists(hashes), flat.batch_exists(hashes)) == (0, 0)
    assert (storage.batch_get_v1([], indices(0)[:0]), flat.batch_get([], []), flat.batch_exists([])) == ([], [], 0)
