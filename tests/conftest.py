"""What tests of several folders share: a daemon of one's own, and a small namespace to fill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.testing.daemon import DaemonProcess
from kvstore.tiers import health


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A real daemon process with 64 MiB of memory and of disk."""
    with DaemonProcess(tmp_path) as process:
        yield process


@pytest.fixture
def faults_pass_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier is well as soon as the call that failed works again, instead of seconds later."""
    monkeypatch.setattr(health, "STANDS_S", 0.0)
