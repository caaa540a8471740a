"""GPU memory offered over the side socket and mapped by other processes: real sockets, descriptors and deaths, a fake GPU."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.clients.hbm import ImportedPool
from kvstore.errors import ConfigError, FormatError, InvalidArgument, Unavailable
from kvstore.geometry import UNIT_BYTES
from kvstore.kernels.arrays import describe
from kvstore.kernels.sharing import MAX_MESSAGE_BYTES
from kvstore.testing.fake_cuda import FakeCuda
from kvstore.tiers.hbm import HbmOptions, HbmTier
from kvstore.tiers.hbm_socket import PoolSocket
from tests.tiers.hbm_owner import CAPACITY_BYTES, WAIT_S, Owner, check_sharing

REFUSED = 801  # status: CUDA_ERROR_NOT_SUPPORTED


@pytest.fixture
def driver() -> Iterator[FakeCuda]:
    """This process's two GPUs; after the test no rule was broken and nothing is left."""
    fake = FakeCuda(devices=2)
    yield fake
    assert fake.violations == []
    assert fake.leaks() == []


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _settle(most: int) -> None:
    """Wait until no more descriptors are open: the socket's own thread closes its end a moment later."""
    deadline = time.monotonic() + WAIT_S
    while _descriptors() > most:
        assert time.monotonic() < deadline, "a descriptor was left open"
        time.sleep(0.01)


def test_memory_shared_as_a_descriptor_outlives_a_killed_owner(driver: FakeCuda, tmp_path: Path) -> None:
    assert check_sharing(driver, tmp_path / "hbm-0.sock", "--fake") == {"shared": True, "outlives_its_owner": True}


def test_memory_shared_by_ipc_is_closed_when_its_owner_ends(driver: FakeCuda, tmp_path: Path) -> None:
    assert check_sharing(driver, tmp_path / "hbm-0.sock", "--fake", "--ipc") == {"shared": True, "outlives_its_owner": False}


def test_an_owner_that_has_ended_offers_nothing(driver: FakeCuda, tmp_path: Path) -> None:
    path = tmp_path / "hbm-0.sock"
    with pytest.raises(Unavailable, match="keeps no blocks on this GPU, or is not running"):
        ImportedPool(driver, path)
    Owner(path, "--fake").end(kill=False)
    assert not path.exists()
    Owner(path, "--fake").end(kill=True)
    with pytest.raises(Unavailable):
        ImportedPool(driver, path)


class Local:
    """A tier and its socket in this process."""

    def __init__(self, path: Path, device: int = 0, descriptors: bool = True) -> None:
        self.driver = FakeCuda(devices=2, descriptors=descriptors)
        self.tier = HbmTier(self.driver, HbmOptions(device, CAPACITY_BYTES))
        self.socket = PoolSocket(self.tier.pool, path)

    def close(self) -> None:
        self.socket.close()
        self.tier.close()
        assert self.driver.leaks() == []


def test_a_client_finds_the_gpu_by_its_name_and_not_its_number(driver: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = Local(tmp_path / "s", device=1)
    monkeypatch.setattr(driver, "uuid", lambda device: f"gpu-{1 - device}")  # as CUDA_VISIBLE_DEVICES=1,0 would
    pool = ImportedPool(driver, tmp_path / "s")
    assert pool.device == 0
    assert driver.calls["facts"] == 0, "a context on each GPU that was looked at"
    pool.close()
    local.close()


def test_a_client_that_does_not_see_the_gpu_is_told(tmp_path: Path) -> None:
    local, before = Local(tmp_path / "s", device=1), _descriptors()
    with pytest.raises(ConfigError, match="does not see the GPU gpu-1"):
        ImportedPool(FakeCuda(devices=1), tmp_path / "s")
    _settle(before)
    local.close()


@pytest.mark.parametrize("call", ["import_descriptor", "map"])
def test_an_import_that_fails_leaves_nothing_behind(driver: FakeCuda, tmp_path: Path, call: str) -> None:
    local, before = Local(tmp_path / "s"), _descriptors()
    driver.fail(call, REFUSED)
    with pytest.raises(Unavailable, match="cannot be mapped"):
        ImportedPool(driver, tmp_path / "s")
    assert driver.leaks() == []
    _settle(before + 1)  # the fake knows one inode more
    local.close()


@pytest.mark.parametrize("descriptors", [True, False])
def test_a_view_is_an_array_on_the_device_until_the_pool_is_closed(driver: FakeCuda, tmp_path: Path, descriptors: bool) -> None:
    local = Local(tmp_path / "s", descriptors=descriptors)
    pool = ImportedPool(driver, tmp_path / "s")
    found = describe(pool.view(UNIT_BYTES, 100))
    assert (found.address, found.shape, found.on_device) == (pool.address + UNIT_BYTES, (100,), True)
    for offset, size in ((-1, 10), (0, 0), (pool.size_bytes - 5, 6)):
        with pytest.raises(InvalidArgument):
            pool.view(offset, size)
    pool.close()
    pool.close()
    with pytest.raises(Unavailable, match="attach again"):
        pool.view(0, 10)
    local.close()


def test_many_clients_are_served_one_after_the_other(tmp_path: Path) -> None:
    local = Local(tmp_path / "s")
    clients = [FakeCuda() for _ in range(20)]
    pools = [ImportedPool(client, tmp_path / "s") for client in clients]
    assert len({pool.size_bytes for pool in pools}) == 1
    local.close()
    for pool in pools:
        pool.close()


def test_a_client_that_connects_and_says_nothing_holds_nobody_up(driver: FakeCuda, tmp_path: Path) -> None:
    local = Local(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(tmp_path / "s"))
        ImportedPool(driver, tmp_path / "s").close()
    local.close()


def test_the_socket_is_for_the_owner_and_its_group(tmp_path: Path) -> None:
    local = Local(tmp_path / "s")
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o660
    local.close()


def test_a_socket_that_cannot_be_bound_is_refused(tmp_path: Path) -> None:
    tier = HbmTier(FakeCuda(), HbmOptions(0, CAPACITY_BYTES))
    for path in (tmp_path / "missing" / "s", tmp_path / ("long" * 40)):
        with pytest.raises(ConfigError, match="at most 107 bytes"):
            PoolSocket(tier.pool, path)
    tier.close()


GOOD = '{"uuid": "gpu-0", "size_bytes": 65536, "kind": "ipc", "handle": "00", "version": 1}\n'


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("", Unavailable),
        ("no json\n", FormatError),
        ("[]\n", FormatError),
        ("{}\n", FormatError),
        (GOOD.replace("1}", "2}"), FormatError),
        (GOOD.replace('"ipc"', '"other"'), FormatError),
        (GOOD.replace('"ipc"', '"descriptor"'), FormatError),
        (GOOD.replace('"00"', '"zz"'), FormatError),
        (GOOD.replace('"00"', '""'), FormatError),
        (GOOD.replace("65536", "-1"), FormatError),
        (GOOD.replace("65536", '"many"'), FormatError),
        (GOOD.replace("}", ', "more": 1}'), FormatError),
        ("x" * (2 * MAX_MESSAGE_BYTES), FormatError),
    ],
)
def test_what_is_no_offer_is_refused(driver: FakeCuda, tmp_path: Path, message: str, error: type[Exception]) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(message.encode())

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(error):
            ImportedPool(driver, tmp_path / "s")
        thread.join(30)
