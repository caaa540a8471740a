"""What a test's vLLM (vllm_child.py) says of its configuration: what the connector takes, refuses, and makes of it.

Runs in vLLM's own venv.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from typing import Any

Answer = Any


class Configured:
    """`llm` is vLLM's, `scheduler` its scheduler, where that is in this process."""

    llm: Any
    scheduler: Any

    def facts(self) -> Answer:
        """How the worker's blocks are made up."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return dataclasses.asdict(get_kv_transfer_group()._facts)

    def construct(self, **changed: Any) -> Answer:
        """Make a connector by its registered name, with some settings changed; what it says where it refuses, else ""."""
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        from kvstore.clients.vllm import register
        from kvstore.errors import KVStoreError

        register()
        register()
        config = copy.copy(self.llm.llm_engine.vllm_config)
        config.kv_transfer_config = copy.copy(config.kv_transfer_config)
        config.kv_transfer_config.kv_connector, config.kv_transfer_config.kv_connector_module_path = "KVStoreConnector", None
        for name, value in changed.items():
            setattr(config.kv_transfer_config, name, value)
        before = _opened()
        try:
            made = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, self.scheduler.kv_cache_config)
        except KVStoreError as error:
            return str(error)
        after = _opened()
        made.shutdown()
        return "" if after == before else f"it has files and threads: {after} for {before}"

    def identities(self) -> Answer:
        """The root of every chain under this engine's configuration, and with one fact of it changed."""
        import torch

        from kvstore.clients.vllm_facts import identity_of
        from kvstore.hashing import fingerprint

        config = self.llm.llm_engine.vllm_config
        text = config.model_config.hf_text_config
        changes: dict[str, tuple[str, dict[str, Any]]] = {
            "as it is": ("model_config", {}),
            "a longer queue": ("scheduler_config", {"max_num_seqs": 77}),
            "type": ("model_config", {"dtype": torch.bfloat16}),
            "type of the cache": ("cache_config", {"cache_dtype": "fp8_e5m2"}),
            "quantization": ("model_config", {"quantization": "fp8"}),
            "weights by chance": ("load_config", {"load_format": "dummy"}),
        }
        for name, value in (
            ("rope_parameters", {"rope_type": "default", "rope_theta": 7.0}),
            ("rms_norm_eps", 0.5),
            ("num_hidden_layers", 2),
        ):
            other = copy.deepcopy(text)
            setattr(other, name, value)
            changes[name] = ("model_config", {"hf_config": other, "hf_text_config": other})
        roots = {}
        for name, (part, values) in changes.items():
            changed = copy.copy(config)
            setattr(changed, part, copy.copy(getattr(config, part)))
            for field, value in values.items():
                object.__setattr__(getattr(changed, part), field, value)
            roots[name] = fingerprint(identity_of(changed, "")).hex()
        return roots | {"revision": fingerprint(identity_of(config, "another")).hex()}

    def refusals(self) -> Answer:
        """What a worker says of KV cache groups of vLLM's other kinds, and of blocks of two lengths, beside those that it has."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, KVCacheGroupSpec, MambaSpec

        from kvstore.clients.vllm_facts import facts_of, pages_for

        config, groups = self.llm.llm_engine.vllm_config, get_kv_transfer_group()._kv_cache_config.kv_cache_groups
        mine = groups[0].kv_cache_spec
        sizes = {"num_kv_heads": mine.num_kv_heads, "head_size": mine.head_size, "dtype": mine.dtype}
        others = {
            "chunked": ChunkedLocalAttentionSpec(block_size=mine.block_size, attention_chunk_size=256, **sizes),
            "states": MambaSpec(block_size=mine.block_size, shapes=((8, 8),), dtypes=(mine.dtype,)),
            "longer": dataclasses.replace(mine, block_size=2 * mine.block_size),
        }
        pages = pages_for(gpu=False)
        return {
            name: facts_of(config, [*groups, KVCacheGroupSpec([], spec)], {}, (0, 0), pages)[0].refusal for name, spec in others.items()
        }


def _opened() -> list[int]:
    """How many files and threads this process has."""
    return [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))]
