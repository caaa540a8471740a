"""The tier in GPU memory passes the contract of all tiers, on a driver that checks the order of everything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.testing.fake_cuda import FakeCuda
from kvstore.testing.tier_contract import TierContract
from kvstore.tiers.base import ByteTier
from kvstore.tiers.hbm import HbmOptions, HbmTier


class TestHbmContract(TierContract):
    @pytest.fixture(autouse=True)
    def driver(self) -> Iterator[FakeCuda]:
        """A GPU; after the test no rule of it was broken."""
        self.fake = FakeCuda()
        yield self.fake
        assert self.fake.violations == []

    def make_tier(self, directory: Path) -> ByteTier:
        return HbmTier(self.fake, HbmOptions(0, self.CAPACITY_BYTES))


class TestHbmByIpcContract(TestHbmContract):
    def make_tier(self, directory: Path) -> ByteTier:
        self.fake = FakeCuda(descriptors=False)
        return HbmTier(self.fake, HbmOptions(0, self.CAPACITY_BYTES))
