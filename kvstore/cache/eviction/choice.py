"""The eviction policies by the names that the settings know them by."""

from __future__ import annotations

from kvstore.cache.eviction.base import PolicyMaker
from kvstore.cache.eviction.cost import Cost
from kvstore.cache.eviction.lru import Lru
from kvstore.cache.eviction.s3fifo import S3Fifo

POLICIES: dict[str, PolicyMaker] = {"lru": Lru, "s3fifo": S3Fifo, "cost": Cost}
