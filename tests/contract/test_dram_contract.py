"""The arena passes the contract of all tiers."""

from __future__ import annotations

from pathlib import Path

from kvstore.testing.tier_contract import TierContract
from kvstore.tiers.base import ByteTier
from kvstore.tiers.dram import DramOptions, DramTier


class TestDramContract(TierContract):
    def make_tier(self, directory: Path) -> ByteTier:
        return DramTier(DramOptions(directory, "contract", self.CAPACITY_BYTES, extent_units=16, epoch="e1"))
