"""The compiled index loops do what their twins in numpy and Python do, on the same arrays; without the library all goes on."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvstore.cache.index import IN_FLIGHT, Index
from kvstore.cache.messages import Hashes, Tier
from kvstore.clients.client import KVClient
from kvstore.native import library as native
from kvstore.native.library import SWITCH, library
from kvstore.testing.daemon import DaemonProcess
from kvstore.tiers import record_codec as codec
from tests.blocks import GEOMETRY, IDENTITY, chain
from tests.cases.figures import read, store

CAPACITY = 300  # rows
TIERS = (Tier.DRAM, Tier.NVME)
needs_library = pytest.mark.skipif(library() is None, reason="the compiled library was not built, or is switched off")


def some_hashes(chance: random.Random, count: int) -> Hashes:
    """Keys that often share their home: few different first words."""
    words = [[chance.randrange(40), chance.randrange(3), chance.randrange(2), chance.randrange(50)] for _ in range(count)]
    return np.array(words, np.uint64).reshape(count, 4)


def plain(index: Index) -> Index:
    index.native = None
    return index


def state_of(index: Index) -> list[list[int]]:
    """All but who stands where in the table: of keys with one home either may have come first."""
    links = (index.parent, index.first_child, index.next_sibling, index.previous_sibling)
    arrays = (np.sort(index.table), index.namespace, *links, index.flags)
    return [array.tolist() for array in arrays] + [index.hash.ravel().tolist(), index._freed[: index._freed_count].tolist()]


@needs_library
@pytest.mark.parametrize("seed", range(30))
def test_compiled_and_plain_rows_are_the_same_after_any_sequence(seed: int) -> None:
    chance = random.Random(seed)
    pair = Index(CAPACITY, TIERS, seed), plain(Index(CAPACITY, TIERS, seed))
    for _ in range(120):
        namespace, hashes = chance.randrange(1, 4), some_hashes(chance, chance.randrange(1, 50))
        found = [index.find(namespace, hashes) for index in pair]
        assert found[0].tolist() == found[1].tolist()
        assert found[0].tolist() == [pair[0].find_one(namespace, key.tobytes()) for key in hashes]
        fresh = np.unique(hashes[found[0] == 0], axis=0)
        if chance.random() < 0.6 and len(fresh) <= pair[0].room:
            rows = [index.add(namespace, fresh)[: len(fresh)] for index in pair]
            assert rows[0].tolist() == rows[1].tolist()
            for row in rows[0].tolist():
                above, kind = chance.choice(pair[0].rows().tolist()), chance.randrange(3)
                linked = above != row and not pair[0].first_child_at[row]
                for index in pair:
                    if linked:
                        index.link(row, above)
                    index.slot[TIERS[kind % 2]][row] = int(kind < 2)
                    index.flags[row] = IN_FLIGHT if kind == 2 and row % 5 == 0 else 0
        used = pair[0].rows().tolist()
        gone = np.array(chance.sample(used, chance.randrange(len(used) // 2 + 1)), np.int32)
        for index in pair:
            for tier in TIERS:
                index.slot[tier][gone[::2]] = 0
            index.drop_empty(gone)
        assert state_of(pair[0]) == state_of(pair[1])


@needs_library
def test_hashes_that_are_not_one_piece_of_memory_are_found() -> None:
    index = Index(CAPACITY, TIERS, 1)
    hashes = some_hashes(random.Random(1), 20)
    _, first = np.unique(hashes, axis=0, return_index=True)
    rows = index.add(1, hashes[first])
    wide = np.repeat(hashes[first], 2, axis=0)
    wide.flags.writeable = False
    assert index.find(1, wide[::2]).tolist() == rows.tolist()


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
def test_an_installation_with_a_compiler_has_the_library() -> None:
    assert os.environ.get(SWITCH) == "off" or library() is not None, "`pip install -v` says what became of kvstore.native._core"


def test_the_library_can_be_switched_off() -> None:
    said = subprocess.run(
        [sys.executable, "-c", "from kvstore.native.library import library; print(library())"],
        env=os.environ | {SWITCH: "off"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.strip() == "None"


def test_a_daemon_without_the_library_serves(tmp_path: Path) -> None:
    process = DaemonProcess(tmp_path)
    process.environment = {SWITCH: "off"}
    with process as daemon, KVClient(daemon.address) as client:
        assert "numpy" in daemon.log()
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        store(client, namespace, chain(1, 20))
        assert read(client, namespace, chain(1, 20)) == 20


@needs_library
def test_compiled_and_plain_record_checks_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    words = np.random.default_rng(1).integers(0, 1 << 64, (500, codec.RECORD_BYTES // 8), dtype=np.uint64)
    records = words.view(codec.RECORD).ravel()
    compiled = codec.seal(records.copy())
    monkeypatch.setattr(codec, "record_checks", lambda _: None)
    assert (codec.seal(records.copy()) == compiled).all()
    assert codec.intact(compiled).all()


def test_a_library_of_another_version_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    source = tmp_path / "old.c"
    source.write_text("int kvstore_version(void) { return 1; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(tmp_path / "_core.so"), str(source)], check=True)
    monkeypatch.setattr(native, "__file__", str(tmp_path / "library.py"))
    assert library.__wrapped__() is None
    source.write_text(f"int kvstore_version(void) {{ return {native.VERSION}; }}\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(tmp_path / "_core_new.so"), str(source)], check=True)
    assert library.__wrapped__() is not None
