"""Cases 13 to 18: what is not the same is never taken for the same, and what is the same is found by everybody."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from hashlib import sha256
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.clients.client import KVClient
from kvstore.clients.handles import Namespace
from kvstore.geometry import Geometry, Quant
from kvstore.hashing import Identity, block_hashes, fingerprint
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import BLOCK_TOKENS, GEOMETRY, IDENTITY, chain, each_hash, pattern, tokens_of
from tests.cases.children import Child
from tests.cases.figures import all_on_disk, read, store

GOLDEN: Mapping[str, Any] = json.loads((Path(__file__).parents[1] / "golden" / "hash_chain.json").read_text(encoding="utf-8"))
FACTS = ("model", "revision", "adapter", "tokenizer", "position", "dtype", "salt")


# ---- 13


def test_processes_with_other_hash_seeds_agree(shared: DaemonProcess, guest: KVClient) -> None:
    """Case 13: what one process stored under its tokens, any other finds under them, whatever its language's own hashes do."""
    with ExitStack() as processes:
        children = [processes.enter_context(Child(shared.address, PYTHONHASHSEED=seed)) for seed in ("0", "1", "random")]
        for seed, writer in enumerate(children):
            assert writer.ask("put", seed, 20) == ["stored"] * 20
            assert [reader.ask("prompt", seed, 20) for reader in children] == [20] * 3
            assert [reader.ask("hold", seed, 20) for reader in children] == [20] * 3
            assert all(reader.ask("right") for reader in children)


@pytest.mark.parametrize("vector", [each for each in GOLDEN["chains"] if not each["extra_pairs"]], ids=lambda vector: vector["name"])
def test_tokens_find_what_golden_hashes_name(guest: KVClient, vector: Mapping[str, Any]) -> None:
    """Case 13: blocks stored under the published hashes are found by anybody who has the tokens."""
    namespace = guest.open_namespace(Identity(**vector["identity"]), replace(GEOMETRY, block_tokens=vector["block_tokens"]))
    hashes = bytes.fromhex("".join(vector["hashes"]))
    assert namespace.root.hex() == vector["fingerprint"]
    assert store(guest, namespace, hashes).stored == len(hashes) // 32
    whole = len(hashes) // 32 * vector["block_tokens"]
    assert guest.lookup(namespace, tokens=[*vector["tokens"][:whole], 7]).blocks == len(hashes) // 32


# ---- 14, 16


def identities() -> dict[str, Identity]:
    """One for each fact, all with the same value in it; and adapters and salts that differ by little."""
    same = {fact: Identity(**{fact: '"x"' if fact == "position" else "x"}) for fact in FACTS}
    digests = ("a" * 64, "a" * 63 + "b", "")
    adapters = {f"adapter {digest[-2:] or 'none'}": replace(IDENTITY, adapter=digest) for digest in digests}
    salts = {f"salt {salt!r}": replace(IDENTITY, salt=salt) for salt in ("1", "1 ", "\x001")}
    split = {f"adapter {one}, salt {two}": replace(IDENTITY, adapter=one, salt=two) for one, two in (("ab", "c"), ("a", "bc"))}
    return {**same, **adapters, **salts, **split}


def test_each_identity_finds_only_its_own(guest: KVClient) -> None:
    """Cases 14 and 16: other adapter, other version of it, a value that moved to another field: no two share a block."""
    tokens = tokens_of(1, 3)
    for identity in identities().values():
        namespace = guest.open_namespace(identity, GEOMETRY)
        assert guest.lookup(namespace, tokens=tokens).blocks == 0
        store(guest, namespace, block_hashes(fingerprint(identity), tokens, BLOCK_TOKENS))
    for identity in identities().values():
        namespace = guest.open_namespace(identity, GEOMETRY)
        assert read(guest, namespace, block_hashes(namespace.root, tokens, BLOCK_TOKENS)) == 3
    roots = [fingerprint(identity) for identity in identities().values()]
    assert all(one != other for one, other in combinations(roots, 2))


def test_one_namespace_serves_many_adapters(guest: KVClient) -> None:
    """Case 14: adapter and salt of a request act through its hashes: one open namespace, and still nothing shared."""
    namespace = guest.open_namespace(IDENTITY, GEOMETRY)
    tokens = tokens_of(1, 3)
    store(guest, namespace, block_hashes(fingerprint(replace(IDENTITY, adapter="one")), tokens, BLOCK_TOKENS))
    found = [guest.lookup(namespace, tokens=tokens, identity=replace(IDENTITY, adapter=name)).blocks for name in ("one", "two", "")]
    assert found == [3, 0, 0]
    assert guest.lookup(namespace, tokens=tokens, identity=replace(IDENTITY, salt="one")).blocks == 0


# ---- 15


@pytest.mark.parametrize(
    "other",
    [
        ((b"image", b"i" * 31 + b"j"),),  # another in its last byte
        ((b"image", b"i" * 31),),  # a part of the digest
        ((b"imag", b"e" + b"i" * 32),),  # the same bytes, cut elsewhere
        ((b"audio", b"i" * 32),),
        ((b"image", b"i" * 32), (b"offset", b"\1")),
        (),
    ],
    ids=["another last byte", "a shorter digest", "cut elsewhere", "another kind", "another offset", "no image"],
)
def test_other_images_share_no_block(guest: KVClient, other: tuple[tuple[bytes, bytes], ...]) -> None:
    """Case 15: the same placeholder tokens with another image: shared up to the image's first block, and not beyond."""
    namespace = guest.open_namespace(IDENTITY, GEOMETRY)
    tokens = tokens_of(1, 6)
    with_image = block_hashes(namespace.root, tokens, BLOCK_TOKENS, {2: ((b"image", b"i" * 32),)})
    store(guest, namespace, with_image)
    assert read(guest, namespace, with_image) == 6
    assert read(guest, namespace, block_hashes(namespace.root, tokens, BLOCK_TOKENS, {2: other})) == 2


# ---- 17


def variants(guest: KVClient) -> dict[str, Namespace]:
    """Namespaces that differ from the first in one thing each."""
    found = {"base": guest.open_namespace(IDENTITY, GEOMETRY)}
    changes: dict[str, Mapping[str, Any]] = {
        "layers": {"layers": 1},
        "heads": {"kv_heads": 1},
        "key dim": {"key_dim": 32},
        "value dim": {"value_dim": 32},
        "dtype of the same size": {"dtype": "float16"},
        "fp8": {"dtype": "float8_e4m3fn"},
        "other fp8": {"dtype": "float8_e5m2"},
        "int8 with scales": {"dtype": "int8", "quant": Quant("symmetric", "token")},
        "scales of another granularity": {"dtype": "int8", "quant": Quant("symmetric", "head")},
        "scales of another dtype": {"dtype": "int8", "quant": Quant("symmetric", "head", "float16")},
        "block tokens": {"block_tokens": 32},
        "an engine's layout": {"format": "engine/1", "opaque_block_bytes": GEOMETRY.block_bytes},
        "another version of it": {"format": "engine/2", "opaque_block_bytes": GEOMETRY.block_bytes},
    }
    for name, change in changes.items():
        found[name] = guest.open_namespace(IDENTITY, replace(GEOMETRY, **change))
    found["latent"] = guest.open_namespace(IDENTITY, Geometry.mla(layers=2, latent_dim=64, rope_dim=16, dtype="bfloat16", block_tokens=16))
    for fact in ("model", "revision", "tokenizer", "dtype"):
        found[fact] = guest.open_namespace(replace(IDENTITY, **{fact: "other"}), GEOMETRY)
    found["position"] = guest.open_namespace(replace(IDENTITY, position='{"rope_theta": 2}'), GEOMETRY)
    for shard, kv_group in (("tp0/2", ""), ("tp1/2", ""), ("", "window"), ("window", "")):
        found[f"shard {shard!r}, group {kv_group!r}"] = guest.open_namespace(IDENTITY, GEOMETRY, shard, kv_group)
    return found


def bytes_of(namespace: Namespace, key: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """What these tests store under a hash in a namespace; nowhere else the same."""
    return pattern(sha256(namespace.digest + key).digest(), namespace.geometry.block_bytes)


def test_the_same_hash_elsewhere_is_another_block(guest: KVClient) -> None:
    """Case 17: under one and the same hash, namespaces that differ in anything hold bytes of their own, never another's."""
    namespaces = variants(guest)
    assert len({namespace.digest for namespace in namespaces.values()}) == len(namespaces)
    hashes = chain(1, 2)
    for name, namespace in namespaces.items():
        assert guest.lookup(namespace, hashes).blocks == 0, name
        with guest.put(namespace, hashes) as put:
            for block in put.blocks:
                block.write(bytes_of(namespace, block.hash))
        assert put.names == ("stored", "stored"), name
    for name, namespace in namespaces.items():
        with guest.get(namespace, hashes) as lease:
            own = [bytes_of(namespace, key) for key in each_hash(hashes)]
            assert [np.array_equal(view, each) for view, each in zip(lease.views, own, strict=True)] == [True, True], name


def test_names_for_one_layout_are_one_namespace(guest: KVClient) -> None:
    """Case 17: and what is the same is shared: grouped-query attention is attention with fewer heads, however it is called."""
    store(guest, guest.open_namespace(IDENTITY, GEOMETRY), chain(1, 2))
    assert read(guest, guest.open_namespace(IDENTITY, replace(GEOMETRY, kind="gqa")), chain(1, 2)) == 2
    with KVClient(guest.place.removeprefix("unix:")) as other:
        assert read(other, other.open_namespace(replace(IDENTITY, salt="s", adapter="a"), GEOMETRY), chain(1, 2)) == 2


# ---- 18


def one_bit_apart(key: bytes) -> list[bytes]:
    """The hash with each of its 256 bits flipped, one at a time."""
    number = int.from_bytes(key, "little")
    return [(number ^ (1 << bit)).to_bytes(32, "little") for bit in range(256)]


def test_every_bit_of_a_hash_counts(daemon: DaemonProcess, client: KVClient) -> None:
    """Case 18: hashes that agree in all but one bit are different blocks, in memory, on disk and after a restart."""
    namespace = client.open_namespace(IDENTITY, GEOMETRY)
    key = chain(1, 1)
    others = one_bit_apart(key)
    store(client, namespace, key)
    assert [client.lookup(namespace, other).blocks for other in others] == [0] * 256
    for other in others:
        assert store(client, namespace, other).names == ("stored",)
    assert [read(client, namespace, each) for each in (key, *others)] == [1] * 257
    assert all_on_disk(client, 257)
    daemon.restart()
    assert [read(client, namespace, each) for each in (key, *others)] == [1] * 257


def test_a_chain_is_more_than_its_last_hash(guest: KVClient) -> None:
    """Case 18: a known last hash behind an unknown one is no hit: a prefix ends where the first hash is not known."""
    namespace = guest.open_namespace(IDENTITY, GEOMETRY)
    stored, other = each_hash(chain(1, 3)), each_hash(chain(2, 3))
    store(guest, namespace, b"".join(stored))
    for at in range(3):
        mixed = [*stored[:at], other[at], *stored[at + 1 :]]
        assert guest.lookup(namespace, b"".join(mixed)).blocks == at
        assert read(guest, namespace, b"".join(mixed)) == at


def test_the_same_tokens_after_others_are_another_block(guest: KVClient) -> None:
    """Case 18: a block's hash holds all that came before it: equal tokens under another parent share nothing."""
    namespace = guest.open_namespace(IDENTITY, GEOMETRY)
    tail = tokens_of(3, 2)
    first, second = ([*tokens_of(seed, 1, 0), *tail] for seed in (1, 2))
    store(guest, namespace, block_hashes(namespace.root, first, BLOCK_TOKENS))
    assert guest.lookup(namespace, tokens=first).blocks == 3
    assert guest.lookup(namespace, tokens=second).blocks == 0
