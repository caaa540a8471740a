"""Partial tails through a store's own interface: both providers answer as a radix tree would, and the first tokens can be taken over."""

from __future__ import annotations

import dataclasses
import itertools
import time
import urllib.request
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.cli.main import main
from kvstore.clients import requests
from kvstore.clients.blocks import BlockStore, Prompt, Slots, Tail
from kvstore.clients.blocksession import BlockSession
from kvstore.clients.client import KVClient
from kvstore.errors import GeometryError, InvalidArgument
from kvstore.geometry import Geometry, Quant
from kvstore.hashing import block_hashes, fingerprint, usable_blocks
from kvstore.proto.kvstore_pb2_grpc import KVStoreStub
from kvstore.testing.daemon import DaemonProcess
from kvstore.worker.standalone import StandaloneStore
from kvstore.worker.tails import copy_tail
from tests.blocks import IDENTITY
from tests.cache.prompts import common

SIZE = 4  # tokens a block
GEOMETRY = Geometry("gqa", 2, 2, 8, 8, "float32", SIZE)
ROOT = fingerprint(IDENTITY)
UNIT = 4096
SCALED = dataclasses.replace(GEOMETRY, dtype="int8", quant=Quant("symmetric", "token"))
SHARED = dataclasses.replace(SCALED, quant=Quant("symmetric", "head"))
OPAQUE = dataclasses.replace(GEOMETRY, format="engine/1", opaque_block_bytes=4096)


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(dram="8MiB", nvme_bytes="32MiB") as process:
        yield process


@pytest.fixture(params=["daemon", "standalone"])
def store(request: pytest.FixtureRequest, daemon: DaemonProcess) -> Iterator[BlockStore]:
    if request.param == "standalone":
        made: BlockStore = StandaloneStore(IDENTITY, GEOMETRY, 2048 * GEOMETRY.slot_bytes, tails=True)
    else:
        with KVClient(daemon.address) as client:
            made = client.open_blocks(IDENTITY, GEOMETRY, tails=True)
    yield made
    made.close()


leases = itertools.count(1)
runs = itertools.count(1)


def values(tokens: list[int]) -> NDArray[np.float32]:
    """What a model would compute for the last token of a prompt, as one number: any two prompts have other ones."""
    return np.array([hash(tuple(tokens[: end + 1])) % 2**24 for end in range(len(tokens))], np.float32)


def block(store: BlockStore, unit: int) -> NDArray[np.float32]:
    """A slot's elements. [layer, 2, head, token, dim]"""
    view = store.geometry.block_view()
    return store.arena[unit * UNIT :][: store.geometry.block_bytes].view(np.float32).reshape(view.shape)


def put(store: BlockStore, root: bytes, prompt: list[int], ids: list[int] | None = None) -> None:
    """Store a prompt's whole blocks; each element of a token tells its whole prompt."""
    hashes = block_hashes(root, prompt, SIZE)
    slots = store.reserve(len(hashes) // 32)
    for number, unit in enumerate(slots.units.tolist()):
        block(store, unit)[...] = values(prompt)[number * SIZE : (number + 1) * SIZE, None]
    lease = next(leases)
    store.commit(lease, slots, hashes, root, prompt[: len(slots) * SIZE] if ids is None else ids)
    assert store.flush(5)
    store.abandon(slots)
    store.release(lease)


def get(store: BlockStore, root: bytes, prompt: list[int]) -> tuple[int, Slots]:
    """The lease, and what it gives of a prompt."""
    usable = usable_blocks(len(prompt), SIZE)
    lease = next(leases)
    return lease, store.acquire(lease, block_hashes(root, prompt[: usable * SIZE], SIZE), 5.0, Prompt(prompt, root))


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=5 * SIZE)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stored=st.lists(prompts, max_size=6), asked=st.lists(prompts, min_size=1, max_size=4))
def test_a_hit_is_that_of_a_radix_tree_and_its_bytes_are_right(store: BlockStore, stored: list[list[int]], asked: list[list[int]]) -> None:
    root = next(runs).to_bytes(32, "little")  # another store's worth of prompts
    for prompt in stored:
        if len(prompt) >= SIZE:
            put(store, root, prompt)
    for prompt in asked:
        lease, slots = get(store, root, prompt)
        naive = max((common(prompt[:-1], each[: len(each) // SIZE * SIZE]) for each in stored), default=0)
        hit = len(slots) * SIZE + (slots.tail.tokens if slots.tail else 0)
        assert hit == naive
        right = values(prompt)
        for number, unit in enumerate(slots.units.tolist()):
            assert (block(store, unit) == right[number * SIZE : (number + 1) * SIZE, None]).all()
        if slots.tail:
            own = store.reserve(1)
            unit = int(own.units[0])
            block(store, unit)[...] = -1
            copy_tail(GEOMETRY, store.arena, slots.tail, store.arena, unit)
            assert (block(store, unit)[:, :, :, : slots.tail.tokens] == right[len(slots) * SIZE : hit, None]).all()
            assert (block(store, unit)[:, :, :, slots.tail.tokens :] == -1).all()
            store.abandon(own)
        store.release(lease)


def test_tokens_that_are_not_the_blocks_own_publish_nothing(store: BlockStore) -> None:
    put(store, ROOT, [5, 6, 7, 8], [5, 6, 7, 9])
    for prompt in ([5, 6, 7, 8, 1], [5, 6, 7, 9, 1]):
        lease, slots = get(store, ROOT, prompt)
        assert (len(slots), slots.tail) == (0, None)
        store.release(lease)
    if isinstance(store, BlockSession):
        assert store.outcomes["failed"] == 1
        assert "stored" not in store.outcomes


def test_without_a_prompt_there_is_no_tail(store: BlockStore) -> None:
    assert store.tails
    root = next(runs).to_bytes(32, "little")
    put(store, root, [5, 6, 7, 8, 1, 2, 3, 4])
    slots = store.acquire(next(leases), block_hashes(root, [5, 6, 7, 8], SIZE), 5.0)
    assert (len(slots), slots.tail) == (1, None)


def test_a_prompt_of_one_token_hits_nothing(store: BlockStore) -> None:
    root = next(runs).to_bytes(32, "little")
    put(store, root, [5] * 4)
    _, slots = get(store, root, [5])
    assert (len(slots), slots.tail) == (0, None)


def test_the_tail_is_held_until_it_is_released_alone() -> None:
    store = StandaloneStore(IDENTITY, GEOMETRY, 2 * GEOMETRY.slot_bytes, tails=True)
    put(store, ROOT, [1] * 8)
    lease, slots = get(store, ROOT, [1, 1, 1, 1, 1, 1, 2])
    assert slots.tail is not None
    assert slots.tail.tokens == 2
    assert len(store.reserve(1)) == 0
    store.release(lease, keep_blocks=len(slots))
    assert len(store.reserve(1)) == 1


def test_a_store_without_tails_takes_prompts_and_tokens_as_nothing(daemon: DaemonProcess) -> None:
    with KVClient(daemon.address) as client:
        shared = client.open_blocks(IDENTITY, dataclasses.replace(GEOMETRY, layers=3))
    for store in (shared, StandaloneStore(IDENTITY, GEOMETRY, 64 * GEOMETRY.slot_bytes)):
        assert not store.tails
        slots = store.reserve(1)
        store.commit(next(leases), slots, block_hashes(ROOT, [1] * 4, SIZE), ROOT, [1] * 4)
        assert store.flush(5)
        _, found = get(store, ROOT, [1] * 5)
        assert (len(found), found.tail) == (1, None)
        _, found = get(store, ROOT, [1] * 3)
        assert (len(found), found.tail) == (0, None)
        store.close()


@pytest.mark.parametrize("geometry", [OPAQUE, SHARED], ids=["opaque", "scales for several tokens"])
def test_tails_are_refused_where_the_first_tokens_are_not_apart(daemon: DaemonProcess, geometry: Geometry) -> None:
    with KVClient(daemon.address) as client, pytest.raises(GeometryError, match="without tails"):
        client.open_blocks(IDENTITY, geometry, tails=True)
    with pytest.raises(GeometryError, match="without tails"):
        StandaloneStore(IDENTITY, geometry, 1 << 20, tails=True)
    request = requests.open_namespace(IDENTITY, geometry, "", "", requests.KEEP_ALL, tails=True)
    with grpc.insecure_channel(f"unix:{daemon.address}") as channel, pytest.raises(grpc.RpcError, match=r"GeometryError.*without tails"):
        KVStoreStub(channel).OpenNamespace(request)
    with pytest.raises(GeometryError, match="kv1"):
        copy_tail(geometry, np.zeros(1 << 20, np.uint8), Tail(0, 1, 1), np.zeros(1 << 20, np.uint8), 0)


def test_token_ids_are_figures_of_their_own(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
    geometry = dataclasses.replace(GEOMETRY, layers=5)
    with KVClient(daemon.address) as client:
        before = client.stats()
        store = client.open_blocks(IDENTITY, geometry, tails=True)
        slots = store.reserve(3)
        store.commit(next(leases), slots, block_hashes(ROOT, [1] * 12, SIZE), ROOT, [1] * 12)
        assert store.flush(5)
        after = client.stats()
        assert after.tail_blocks - before.tail_blocks == 3
        assert after.tail_bytes - before.tail_bytes == 3 * 76
        assert after.tail_capacity_bytes >= 76 * after.index_capacity_blocks
        with urllib.request.urlopen(f"http://{daemon.metrics_address}/metrics", timeout=5) as reply:
            lines = reply.read().decode().splitlines()
        assert f"kvstore_tail_blocks {float(after.tail_blocks)}" in lines
        assert f"kvstore_tail_bytes {float(after.tail_bytes)}" in lines
        assert main(["stats", "--address", daemon.address]) == 0
        assert f"token ids of {after.tail_blocks} blocks" in capsys.readouterr().out
        store.close()


def test_after_a_restart_blocks_are_donors_again_once_their_prompt_was_read() -> None:
    with DaemonProcess(dram="4MiB", nvme_bytes="16MiB") as daemon:
        with KVClient(daemon.address) as client:
            store = client.open_blocks(IDENTITY, GEOMETRY, tails=True)
            put(store, ROOT, [1] * 8)
            until = time.monotonic() + 30
            while next(tier.blocks for tier in client.stats().tiers if tier.tier == "nvme") < 2:
                assert time.monotonic() < until, "the blocks are never written"
                time.sleep(0.01)
        store.close()
        daemon.restart()
        with KVClient(daemon.address) as client:
            store = client.open_blocks(IDENTITY, GEOMETRY, tails=True)
        prompt = [1, 1, 1, 1, 1, 1, 2]
        assert [(len(slots), slots.tail) for _, slots in [get(store, ROOT, prompt)]] == [(1, None)], "ids are not on the disk"
        assert len(get(store, ROOT, [1] * 9)[1]) == 2
        _, slots = get(store, ROOT, prompt)
        assert len(slots) == 1
        assert slots.tail is not None
        assert slots.tail.tokens == 2
        assert (block(store, slots.tail.unit)[:, :, :, :2] == values([1] * 8)[4:6, None]).all()
        store.close()


GEOMETRIES = [
    GEOMETRY,
    dataclasses.replace(GEOMETRY, layers=1),
    dataclasses.replace(GEOMETRY, kv_heads=1, value_dim=16, dtype="bfloat16"),
    SCALED,
    dataclasses.replace(SCALED, kv_heads=1, key_dim=3),
    Geometry.mla(layers=3, latent_dim=16, rope_dim=4, dtype="float32", block_tokens=SIZE),
    dataclasses.replace(
        Geometry.mla(layers=2, latent_dim=16, rope_dim=4, dtype="int8", block_tokens=SIZE), quant=Quant("symmetric", "token", "float16")
    ),
]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda each: f"{each.kind}-{each.layers}-{each.dtype}")
@pytest.mark.parametrize("tokens", range(1, SIZE + 1))
def test_just_the_first_tokens_of_every_tensor_are_copied(geometry: Geometry, tokens: int) -> None:
    arena = np.random.default_rng(1).integers(0, 256, 2 * geometry.slot_bytes, np.uint8)
    before = arena.copy()
    copy_tail(geometry, arena, Tail(0, 1, tokens), arena, geometry.slot_units)
    own, donor = arena[geometry.slot_bytes :], arena[: geometry.slot_bytes]
    assert (donor == before[: geometry.slot_bytes]).all()
    expected = before[geometry.slot_bytes :].copy()
    for layer in geometry.tensor_views():
        for name, view in layer.items():
            axis = len(view.shape) - (1 if name.endswith("_scale") else 2)
            last = 1 if name.endswith("_scale") else view.shape[-1]
            width = view.strides_bytes[axis] if name.endswith("_scale") else view.strides_bytes[-1] * last
            for head in range(view.shape[0] if axis else 1):
                for token in range(tokens):
                    at = view.offset_bytes + token * view.strides_bytes[axis] + (head * view.strides_bytes[0] if axis else 0)
                    expected[at : at + width] = donor[at : at + width]
    assert (own == expected).all()


def test_a_copy_stays_within_the_arena() -> None:
    arena = np.zeros(2 * GEOMETRY.slot_bytes, np.uint8)
    for tail, unit in ((Tail(0, 1, 0), 1), (Tail(0, 1, SIZE + 1), 1), (Tail(2, 1, 1), 0), (Tail(0, 1, 1), 2), (Tail(0, 1, 1), -1)):
        with pytest.raises(InvalidArgument):
            copy_tail(GEOMETRY, arena, tail, arena, unit)
