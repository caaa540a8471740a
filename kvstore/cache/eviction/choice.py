"""The eviction policies by the names that the settings know them by."""

from __future__ import annotations

from kvstore.cache.eviction.base import PolicyMaker
from kvstore.cache.eviction.lru import Lru

POLICIES: dict[str, PolicyMaker] = {"lru": Lru}
