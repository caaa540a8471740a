"""Every eviction policy passes the contract of all, and the settings know each by its name."""

from __future__ import annotations

from kvstore.cache.eviction.choice import POLICIES
from kvstore.cache.state import CacheSizes
from kvstore.config import Settings
from tests.contract.policy_contract import PolicyContract


class TestLru(PolicyContract):
    eviction = "lru"


class TestS3Fifo(PolicyContract):
    eviction = "s3fifo"


class TestCost(PolicyContract):
    eviction = "cost"


def test_every_policy_has_passed_the_contract() -> None:
    assert {policy.eviction for policy in PolicyContract.__subclasses__()} == set(POLICIES)


def test_the_settings_offer_just_the_policies_there_are() -> None:
    field = Settings.__dataclass_fields__["eviction"]
    assert set(field.metadata["choices"]) == set(POLICIES)
    assert Settings().eviction == CacheSizes(1).eviction == "lru"
