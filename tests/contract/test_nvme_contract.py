"""The disk passes the contract of all tiers, past the page cache and through it, whatever a write is to outlive."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from kvstore.testing.tier_contract import TierContract
from kvstore.tiers.base import ByteTier, HealthState
from kvstore.tiers.nvme import Durable, NvmeOptions, NvmeTier


def opened(directory: Path, capacity_bytes: int, durable: Durable = Durable.PROCESS) -> NvmeTier:
    return asyncio.run(NvmeTier.open(NvmeOptions(directory / "nvme", capacity_bytes, extent_units=16, durable=durable)))


class TestNvmeContract(TierContract):
    def make_tier(self, directory: Path) -> ByteTier:
        return opened(directory, self.CAPACITY_BYTES)


class TestNvmePowerContract(TierContract):
    def make_tier(self, directory: Path) -> ByteTier:
        return opened(directory, self.CAPACITY_BYTES, Durable.POWER)


class TestBufferedNvmeContract(TierContract):
    @pytest.fixture(autouse=True)
    def no_direct_io(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A file system that refuses O_DIRECT at open."""
        real = os.open

        def refusing(path: str | Path, flags: int, mode: int = 0o777) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(path, flags, mode)

        monkeypatch.setattr(os, "open", refusing)

    def make_tier(self, directory: Path) -> ByteTier:
        return opened(directory, self.CAPACITY_BYTES)

    def test_health_says_what_is_refused(self, tier: ByteTier) -> None:
        assert tier.health().state is HealthState.DEGRADED
        assert "O_DIRECT" in tier.health().reason
