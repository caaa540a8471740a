"""The setting of the eviction policy reaches the cache."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvstore.cache.eviction.choice import POLICIES
from kvstore.cache.messages import Tier
from kvstore.config import DramSettings, Settings
from kvstore.daemon import startup


@pytest.mark.parametrize("eviction", POLICIES)
def test_the_daemon_evicts_as_its_settings_say(tmp_path: Path, eviction: str) -> None:
    settings = Settings(listen=str(tmp_path / "s"), dram=DramSettings(bytes=4 << 20, dir=str(tmp_path)), eviction=eviction)
    parts = asyncio.run(startup.build(settings))
    try:
        assert type(parts.hub.cache.state.policies[Tier.DRAM]) is POLICIES[eviction]
    finally:
        parts.dram.remove()
