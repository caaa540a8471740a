"""What keeps SGLang engines' pages apart, and what is refused because it cannot be told apart."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs SGLang: make test-sglang makes a venv that has it", allow_module_level=True)

from kvstore.clients.sglang_facts import facts_of
from kvstore.errors import ConfigError, InvalidArgument
from kvstore.hashing import fingerprint
from kvstore.testing.daemon import DaemonProcess
from tests.engines.pools import backend, config, indices, keys, latent_pool, page_bytes, pool

from kvstore.clients.sglang import _arguments  # isort: skip
from sglang.srt import runtime_context  # isort: skip
from sglang.srt.mem_cache.hicache_storage import PoolName  # isort: skip
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry  # isort: skip
from sglang.srt.mem_cache.utils import storage_namespace_seed  # isort: skip
from sglang.srt.server_args import ServerArgs  # isort: skip


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(nvme=False) as process:
        yield process


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder, as far as its identity goes."""
    place = tmp_path / "some-model"
    place.mkdir()
    (place / "model.safetensors").write_bytes(b"weights")
    (place / "config.json").write_text(json.dumps({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}))
    return place


def root(arguments: Any = None, host_pool: Any = None, extra: dict[str, Any] | None = None, **facts: Any) -> tuple[bytes, str]:
    """What pages of these settings hang from, with their layout and shard."""
    made = facts_of(config(extra, **facts), host_pool or pool(), arguments, "1")
    return fingerprint(made.identity), f"{made.geometry.fields()} {made.shard}"


def served(folder: Path, **settings: Any) -> Any:
    """The engine's settings for this model."""
    return ServerArgs(model_path=str(folder), **settings)


def named(arguments: Any, **extra: Any) -> tuple[bytes, str]:
    """As `root`, where nothing in the extra config says which weights or adapters are served."""
    made = config()
    made.extra_config = {**{name: value for name, value in (made.extra_config or {}).items() if name not in ("revision", "lora")}, **extra}
    facts = facts_of(made, pool(), arguments, "1")
    return fingerprint(facts.identity), facts.shard


def test_engines_that_differ_in_a_fact_share_nothing(daemon: DaemonProcess) -> None:
    hashes = keys(3)
    bytes_pool = pool(dtype=torch.uint8, seed=9)
    settings: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
        (pool(seed=1), {}, {}),
        (pool(seed=2), {"revision": "r2"}, {}),
        (pool(seed=3), {"lora": "sha256:a"}, {}),
        (pool(seed=4), {"lora": "sha256:b"}, {}),
        (pool(seed=5), {"position": {"rope_theta": 5e5}}, {}),
        (pool(seed=6, layers=2), {}, {}),
        (pool("page_head", seed=7), {}, {}),
        (pool("layer_first", seed=8), {}, {}),
        (pool(dtype=torch.bfloat16, seed=10), {}, {}),
        (pool(dtype=torch.float16, seed=11), {}, {}),
        (bytes_pool, {"kv_cache_dtype": "fp8_e4m3"}, {}),
        (bytes_pool, {"kv_cache_dtype": "fp8_e5m2"}, {}),
        (pool(seed=12), {}, {"tp_rank": 0, "tp_size": 2}),
        (pool(seed=13), {}, {"tp_rank": 1, "tp_size": 2}),
        (pool(seed=14), {}, {"pp_rank": 1, "pp_size": 2}),
        (pool(seed=15), {}, {"attn_cp_rank": 1, "attn_cp_size": 2}),
        (pool(seed=16), {}, {"model_name": "another/name"}),
        (latent_pool(seed=17), {}, {"is_mla_model": True}),
    ]
    everyone = [(backend(daemon.address, each, {"interface_v1": 1} | extra, **facts), each) for each, extra, facts in settings]
    for storage, _ in everyone:
        assert storage.batch_exists(hashes) == 0
        assert all(storage.batch_set_v1(hashes, indices(0, 1, 2)))
    for storage, host_pool in everyone:
        assert all(storage.batch_get_v1(hashes, indices(4, 5, 6)))
        assert [page_bytes(host_pool, page) for page in (4, 5, 6)] == [page_bytes(host_pool, page) for page in (0, 1, 2)]
        storage.close()


def test_pages_taken_flat_and_by_buffers_do_not_mix(daemon: DaemonProcess) -> None:
    source, hashes = pool("layer_first", seed=1), keys(1, "order")
    flat, buffers = backend(daemon.address, source), backend(daemon.address, source, {"interface_v1": 1})
    assert flat.set(hashes[0], source.get_data_page(0))
    assert not buffers.exists(hashes[0])
    flat.close()
    buffers.close()


def test_ranks_of_a_latent_model_share(daemon: DaemonProcess) -> None:
    source, target, hashes = latent_pool(seed=3), latent_pool(), keys(2, "latent")
    facts: dict[str, Any] = {"is_mla_model": True, "tp_size": 4}
    first, third = (backend(daemon.address, each, {"interface_v1": 1}, tp_rank=rank, **facts) for rank, each in ((0, source), (2, target)))
    assert all(first.batch_set_v1(hashes, indices(0, 1)))
    assert all(third.batch_get_v1(hashes, indices(0, 1)))
    assert [page_bytes(target, page) for page in (0, 1)] == [page_bytes(source, page) for page in (0, 1)]
    first.close()
    third.close()


def test_salts_and_adapters_of_requests_are_in_the_engine_s_hashes(daemon: DaemonProcess) -> None:
    source = pool(seed=4)
    storage = backend(daemon.address, source, {"interface_v1": 1, "lora": "sha256:both"})
    seeds = [storage_namespace_seed(*each) for each in ((None, None), ("lora-1", None), ("lora-2", None), (None, "a"), (None, "b"))]
    chains = [keys(2, str(seed)) for seed in seeds]
    for chain in chains:
        assert storage.batch_exists(chain) == 0
        assert all(storage.batch_set_v1(chain, indices(0, 1)))
    assert all(storage.batch_exists(chain) == 2 for chain in chains)
    storage.close()


def test_a_local_model_is_named_by_what_is_in_it(folder: Path) -> None:
    before = named(served(folder))
    assert named(served(folder)) == before
    elsewhere = folder.parent / "moved" / folder.name
    elsewhere.parent.mkdir()
    folder.rename(elsewhere)
    assert named(served(elsewhere)) == before
    elsewhere.rename(folder)
    (folder / "model.safetensors").write_bytes(b"weight5")
    assert named(served(folder)) != before


@pytest.mark.parametrize(
    "settings",
    [
        {"json_model_override_args": '{"rope_theta": 5}'},
        {"quantization": "fp8"},
        {"dtype": "float16"},
        {"load_format": "dummy"},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"revision": "0123"},
        {"weight_version": "2"},
    ],
)
def test_settings_that_change_keys_and_values_share_nothing(folder: Path, settings: dict[str, Any]) -> None:
    assert named(served(folder, **settings)) != named(served(folder))


def test_scales_of_a_quantised_cache_are_part_of_the_identity(folder: Path) -> None:
    scales = folder.parent / "scales.json"
    roots = []
    for text in ("{}", '{"a": 1}'):
        scales.write_text(text)
        roots.append(named(served(folder, quantization_param_path=str(scales))))
    assert len({*roots, named(served(folder))}) == 3


@pytest.mark.parametrize("where", ["config.json", "override"])
def test_a_rope_that_depends_on_the_length_is_refused(folder: Path, where: str) -> None:
    rope = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}
    if where == "config.json":
        (folder / "config.json").write_text(json.dumps({"text_config": rope}))
    with pytest.raises(InvalidArgument, match="dynamic"):
        named(served(folder, json_model_override_args=json.dumps(rope) if where == "override" else "{}"))


def test_adapters_need_a_name_for_their_weights(folder: Path) -> None:
    for arguments in (served(folder, lora_paths=["a=/adapters/a"]), served(folder, enable_lora=True)):
        with pytest.raises(ConfigError, match="'lora': a digest"):
            named(arguments)
        assert named(arguments, lora="sha256:1") != named(arguments, lora="sha256:2")


def test_weights_that_nothing_names_are_refused(tmp_path: Path) -> None:
    for arguments in (None, served(tmp_path), served(tmp_path / "nowhere")):
        with pytest.raises(ConfigError, match="'revision'"):
            named(arguments, lora="")
    with pytest.raises(ConfigError, match="'lora'"):
        named(None, revision="r")


def test_the_engine_s_settings_are_read_where_it_publishes_them(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    assert _arguments() is None
    arguments = served(folder)
    monkeypatch.setattr(runtime_context, "_CONTEXT", SimpleNamespace(server_args=arguments))
    assert _arguments() is arguments


def test_pools_that_cannot_be_shared_are_refused(daemon: DaemonProcess) -> None:
    kept, other = pool(), latent_pool()
    entries = [PoolEntry(name, each, None, lambda layer: layer) for name, each in ((PoolName.KV, kept), (PoolName.SWA, other))]
    with pytest.raises(ConfigError, match=r"kv, swa.*full attention"):
        backend(daemon.address, HostPoolGroup(entries))
    storage = backend(daemon.address, HostPoolGroup(entries[:1]), {"interface_v1": 1})
    assert all(storage.batch_set_v1(keys(1, "group"), indices(0)))
    storage.register_mem_host_pool_v2(kept, PoolName.KV)
    with pytest.raises(ConfigError, match="swa"):
        storage.register_mem_host_pool_v2(other, PoolName.SWA)
    storage.close()


def test_pages_of_other_shapes_are_refused(daemon: DaemonProcess) -> None:
    drafted, unified = pool(), pool()
    drafted.target_layer_num -= 1
    unified.layout = "page_unified"
    for host_pool, says in ((drafted, "draft"), (unified, "--hicache-mem-layout"), (SimpleNamespace(layout="page_first"), "has no")):
        with pytest.raises(ConfigError, match=says):
            backend(daemon.address, host_pool)
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        backend(daemon.address, pool(dtype=torch.uint8))
    with pytest.raises(ConfigError, match="tp_lcm_size"):
        backend(daemon.address, pool(), should_split_heads=True)


@pytest.mark.parametrize("value", [-1, 61, "5", True, None])
def test_a_deadline_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="timeout_s"):
        backend("/nowhere", pool(), {"timeout_s": value})


def test_an_option_that_nobody_reads_is_told(daemon: DaemonProcess, caplog: pytest.LogCaptureFixture) -> None:
    backend(daemon.address, pool(), {"revison": "r2"}).close()
    assert "revison" in caplog.text
