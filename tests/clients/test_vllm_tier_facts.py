"""What a tier of vLLM's offloading shares with whom, and what it knows of the store without asking."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.clients.client import KVClient
from kvstore.clients.vllm_presence import Presence
from kvstore.clients.vllm_tier_facts import TierFacts, facts_of
from kvstore.errors import ConfigError
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import GEOMETRY, IDENTITY, chain, each_hash
from tests.cases.figures import all_on_disk, eventually, store


def config(model: str, **changed: Any) -> Any:
    """vLLM's OffloadingConfig, as far as it is read; `changed` by the names of its leaves."""
    parallel = {"world_size": 2, "tp_size": 2, "pp_size": 1, "pcp_size": 1, "dcp_size": 1}
    return SimpleNamespace(
        model=SimpleNamespace(name=model, dtype=changed.get("dtype", "bfloat16")),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=changed.get("blocks_per_chunk", 1)),
        groups=[SimpleNamespace(tokens_per_block=changed.get("tokens_per_block", 16), layer_names=changed.get("layers", ("a", "b")))],
        parallel=SimpleNamespace(**{name: changed.get(name, value) for name, value in parallel.items()}),
        kv_cache_layout=changed.get("kv_cache_layout", "LBHNC"),
        canonical_layout=changed.get("canonical_layout", False),
        replicated_layout=False,
    )


def facts(model: str = "org/model", revision: str = "1", layout: str = "", device: str = "cuda/9.0", **changed: Any) -> TierFacts:
    return facts_of(config(model, **changed), device, changed.get("version", "0.32.0"), 8192, revision, layout)


def test_one_fact_apart_is_another_namespace() -> None:
    changes: list[dict[str, Any]] = [
        {"model": "org/other"},
        {"revision": "2"},
        {"layout": "flashinfer"},
        {"device": "cuda/10.0"},
        {"version": "0.33.0"},
        {"dtype": "float16"},
        {"tp_size": 1},
        {"world_size": 4},
        {"blocks_per_chunk": 2},
        {"tokens_per_block": 32},
        {"layers": ("a", "c")},
        {"kv_cache_layout": "LBNHC"},
        {"canonical_layout": True},
    ]
    assert facts() == facts()
    assert len({repr(facts(**changed)) for changed in [{}, *changes]}) == len(changes) + 1


def test_weights_are_named_by_a_revision_or_by_their_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give the tier a 'revision'"):
        facts(revision="")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text('{"rope_theta": 1}')
    first = facts(str(tmp_path), revision="").identity
    (tmp_path / "config.json").write_text('{"rope_theta": 2}')
    assert facts(str(tmp_path), revision="").identity.revision != first.revision


def test_on_a_cpu_the_layout_must_be_said() -> None:
    with pytest.raises(ConfigError, match="use KVStoreConnector"):
        facts(device="cpu")
    assert facts(device="cpu", layout="amx").geometry.opaque_block_bytes == 8192


def test_presence_follows_the_store(tmp_path: Path) -> None:
    """What is stored, cleared, and left after the daemon's restart; nothing while it is away."""
    blocks = each_hash(chain(1, 6))
    with DaemonProcess(tmp_path) as daemon, KVClient(daemon.address) as client:
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        store(client, namespace, chain(1, 3))
        listener = KVClient(daemon.address)
        presence = Presence(listener, lambda: listener.open_namespace(IDENTITY, GEOMETRY))
        assert eventually(lambda: len(presence) == 3)
        store(client, namespace, chain(1, 6)[3 * 32 :], blocks[2])
        assert eventually(lambda: all(presence.has(block) for block in blocks))
        presence.follow(blocks[:3])
        presence.unfollow(blocks[2:3])
        assert presence.gone() == set()
        client.clear(namespace)
        assert eventually(lambda: len(presence) == 0)
        assert presence.gone() == set(blocks[:2])
        assert presence.gone() == set()
        presence.follow(blocks[:1])
        store(client, namespace, chain(1, 6))
        assert all_on_disk(client, 6)
        daemon.kill9()
        assert eventually(lambda: len(presence) == 0)
        assert presence.gone() == set(blocks[:1])
        daemon.start()
        assert eventually(lambda: all(presence.has(block) for block in blocks))
        presence.stop()
        assert not presence.has(blocks[0])
        listener.close()
