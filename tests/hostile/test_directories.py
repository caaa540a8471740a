"""A directory that is damaged, foreign, newer or in use: the daemon refuses it in words, or serves what is left, every byte right."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore import errors
from kvstore.clients.client import KVClient
from kvstore.config import DramSettings, NvmeSettings, Settings
from kvstore.daemon import startup
from kvstore.daemon.byte_calls import ByteCalls
from kvstore.daemon.namespaces import KnownNamespace
from kvstore.daemon.startup import Parts
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import GEOMETRY, IDENTITY, chain, each_hash, pattern
from tests.cases.figures import all_on_disk, opaque, read, store
from tests.hostile import ruins

ODD = opaque(5_000)
RUINS = 96
ADVICE = ("run: kvstore fsck --clear", "name a directory", "check the disk", "move it away", "set a ")  # one of which a refusal gives
HANGS_S = 20.0  # seconds: a start on such a small directory takes a fraction of one


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with 80 blocks of two sizes, left in order. 8 MiB."""
    place = tmp_path_factory.mktemp("sound")
    with DaemonProcess(place, dram="8MiB", nvme_bytes="8MiB") as daemon:
        with KVClient(daemon.address) as client:
            for seed, geometry in enumerate((GEOMETRY, ODD)):
                store(client, client.open_namespace(IDENTITY, geometry), chain(seed, 40))
            assert all_on_disk(client, 80)
        daemon.stop()
        yield daemon.data


async def found_in(directory: Path, scratch: Path) -> int:
    """Start on the directory, read every block that it is said to hold, and check each byte. How many there were."""
    settings = Settings(
        listen=str(scratch / "s"),
        dram=DramSettings(bytes=4 << 20, dir=str(scratch)),
        nvme=NvmeSettings(path=str(directory), bytes=8 << 20),
    )
    parts = await startup.build(settings)
    calls = ByteCalls(parts.hub, parts.dram.memory)
    try:
        known = [each for number in range(1, 50) if (each := parts.hub.namespaces.get(number)) is not None]
        return sum([await _read(parts, calls, each) for each in known])
    finally:
        calls.close()
        if parts.hub.transfers is not None:
            assert await asyncio.to_thread(parts.hub.transfers.close, 5.0)
        if parts.nvme is not None:
            parts.nvme.close()
        parts.dram.remove()


async def _read(parts: Parts, calls: ByteCalls, namespace: KnownNamespace) -> int:
    count = 0
    for _, hashes, _ in [each for piece in parts.hub.snapshot(namespace.id) for each in piece]:
        for key in each_hash(hashes):
            pieces = [piece async for piece in calls.read(namespace, np.frombuffer(key, "<u8").reshape(1, 4), 5.0)]
            data = b"".join(piece.data for piece in pieces)
            if pieces:
                assert data == pattern(key, namespace.geometry.block_bytes).tobytes()
                count += 1
    return count


def test_what_is_sound_is_all_found(sound: Path, tmp_path: Path) -> None:
    assert asyncio.run(found_in(ruins.copy(sound, tmp_path / "copy"), tmp_path)) == 80


@pytest.mark.parametrize("part", range(4))
def test_a_ruined_directory_is_refused_in_words_or_serves_what_is_left(sound: Path, tmp_path: Path, part: int) -> None:
    refused = served = 0
    for seed in range(part, RUINS, 4):
        chance = random.Random(seed)
        directory = ruins.copy(sound, tmp_path / f"{seed}")
        done = [ruins.ruin(directory, chance) for _ in range(chance.choice((1, 1, 2)))] if seed else []
        try:
            with contextlib.suppress(FileNotFoundError):
                served += asyncio.run(asyncio.wait_for(found_in(directory, tmp_path), HANGS_S)) > 0
        except (errors.ConfigError, errors.FormatError) as error:
            refused += 1
            if not any(word in str(error) for word in ADVICE):
                raise
        except Exception as error:
            raise AssertionError(f"seed {seed}: {done}: {error!r}") from error
    assert refused >= 3, "what the daemon writes lies elsewhere each time, so how many of 24 ruins end how is not the same each time"
    assert served >= 4


def test_another_programs_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"precious")
    with pytest.raises(errors.FormatError, match="blocks without format"):
        asyncio.run(found_in(tmp_path, tmp_path))
    assert (tmp_path / "data").read_bytes() == b"precious"


def test_a_newer_format_is_refused_whatever_else_it_says(sound: Path, tmp_path: Path) -> None:
    directory = ruins.copy(sound, tmp_path / "newer")
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    (directory / "format.json").write_text(json.dumps({"format": 2, "shards": ["a", "b"]}))
    with pytest.raises(errors.FormatError, match=r"format 2, this kvstore reads format 1; run: kvstore fsck --clear"):
        asyncio.run(found_in(directory, tmp_path))
    after = {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "owner"}
    assert after | {"format.json": b""} == before | {"format.json": b""}, "nothing in it was touched"


def test_two_daemons_on_one_directory_or_socket(tmp_path: Path) -> None:
    """The second is refused in words, by disk and by socket; the first notices nothing."""
    with DaemonProcess(tmp_path / "one", dram="8MiB", nvme_bytes="8MiB") as first, KVClient(first.address) as client:
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        store(client, namespace, chain(1, 10))
        assert all_on_disk(client, 10)
        for flags in (["--nvme", str(first.data)], ["--listen", first.address]):
            second = DaemonProcess(tmp_path / "two", flags, dram="8MiB", nvme_bytes="8MiB")
            with pytest.raises(RuntimeError, match=r"in use by another process \(pid \d+\)|a daemon is serving on"):
                second.start()
            second.close()
        assert read(client, namespace, chain(1, 10)) == 10
        first.restart(kill=False)
        assert read(client, namespace, chain(1, 10)) == 10
