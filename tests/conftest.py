"""What tests of several folders share: a daemon of one's own, faults that pass. And which files begin first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.testing.daemon import DaemonProcess
from kvstore.testing.nursery import Nursery
from kvstore.tiers import health

# Files that take half a minute and more, the longest first: begun last, one of them would keep every other processor waiting for it.
LONGEST = (
    "cache/test_machine.py",
    "simulation/test_simulation.py",
    "engines/test_vllm_windows.py",
    "engines/test_vllm_requests.py",
    "engines/test_vllm_sharing.py",
    "engines/test_vllm_faults.py",
    "test_packaging.py",
    "engines/test_vllm_tier.py",
    "kernels/test_shim.py",
    "engines/test_vllm_models.py",
    "engines/test_vllm_processes.py",
    "engines/test_vllm_adapters.py",
    "engines/test_vllm_events.py",
    "kernels/test_cpu.py",
)
TESTS = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first; the order within a file, and of all others, stays."""
    places = {TESTS / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(scope="session", autouse=True)
def _daemons_are_forks() -> Iterator[None]:
    """Hundreds of daemons are started here: each would spend most of its start on the same imports."""
    with pytest.MonkeyPatch.context() as patch, contextlib.closing(Nursery()) as nursery:
        patch.setattr(DaemonProcess, "nursery", nursery)
        yield


@pytest.fixture
def daemons_by_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Daemons of this test are started as a user does: for what the start, the end, or the memory of the whole process is."""
    monkeypatch.setattr(DaemonProcess, "nursery", None)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A real daemon process with 64 MiB of memory and of disk."""
    with DaemonProcess(tmp_path) as process:
        yield process


@pytest.fixture
def faults_pass_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier is well as soon as the call that failed works again, instead of seconds later."""
    monkeypatch.setattr(health, "STANDS_S", 0.0)
