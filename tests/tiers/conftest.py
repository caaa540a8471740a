"""The disk that the tests of the nvme tier share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiers.disk import Disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """An empty directory; every tier opened on it is closed after the test."""
    disk = Disk(tmp_path / "nvme")
    yield disk
    disk.close()
