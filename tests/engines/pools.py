"""SGLang's own host pools in this machine's memory, their settings, and its file backend beside ours."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from torch import Tensor

from tests.engines import without_gpu  # noqa: F401 — first

from sglang.srt.managers.cache_controller import HiCacheController, PrefetchOperation, StorageOperation  # isort: skip
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo, MLABufferInfo  # isort: skip
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig  # isort: skip
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # isort: skip
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # isort: skip
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory  # isort: skip

PAGE, PAGES = 8, 16  # tokens of a page, pages of a pool
LAYERS, HEADS, DIM = 3, 2, 16  # of the model that the pools are for
EXTRA = {"backend_name": "kvstore", "module_path": "kvstore.clients.sglang", "class_name": "HiCacheKVStore", "revision": "r1", "lora": ""}


def pool(layout: str = "page_first", dtype: torch.dtype = torch.float32, seed: int | None = None, layers: int = LAYERS) -> Any:
    """A host pool of attention with heads; `seed` fills it with noise, None leaves zeros."""
    keys, values = ([torch.zeros(PAGE, HEADS, DIM, dtype=dtype) for _ in range(layers)] for _ in range(2))
    buffers = KVBuffers(
        k=tuple(keys), v=tuple(values), k_data_ptrs=_pointers(keys), v_data_ptrs=_pointers(values), layout=KVBufferLayout.NHD
    )
    info = MHABufferInfo(
        buffers=buffers, page_size=PAGE, head_num=HEADS, head_dim=DIM, v_head_dim=DIM, dtype=dtype, device=torch.device("cpu")
    )
    made = MHATokenToKVPoolHost(info, **_sizes(layout, layers))
    _fill(made.kv_buffer, seed)
    return made


def latent_pool(layout: str = "page_first", seed: int | None = None) -> Any:
    """A host pool of latent attention."""
    latent, rope = 32, 8
    rows = tuple(torch.zeros(PAGE, 1, latent + rope) for _ in range(LAYERS))
    info = MLABufferInfo(
        buffers=rows, data_ptrs=_pointers(rows), layer_indices=tuple(range(LAYERS)), device_layer_num=LAYERS, page_size=PAGE,
        kv_lora_rank=latent, qk_rope_head_dim=rope, kv_cache_dim=latent + rope, dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip
    made = MLATokenToKVPoolHost(info, target_layer_num=LAYERS, **_sizes(layout, LAYERS))
    _fill(made.kv_buffer, seed)
    return made


def _sizes(layout: str, layers: int) -> dict[str, Any]:
    return {
        "host_to_device_ratio": 1.0, "host_size": 0, "page_size": PAGE, "layout": layout, "pin_memory": False, "device": "cpu",
        "device_capacity_tokens": PAGE, "start_layer": 0, "end_layer": layers, "host_token_capacity": PAGE * PAGES,
    }  # fmt: skip


def _pointers(tensors: Sequence[Tensor]) -> Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


def _fill(buffer: Tensor, seed: int | None) -> None:
    if seed is None:
        buffer.zero_()
    else:
        noise = torch.randint(0, 256, (buffer.numel() * buffer.element_size(),), generator=torch.Generator().manual_seed(seed))
        buffer.view(torch.uint8).copy_(noise.to(torch.uint8).view(buffer.view(torch.uint8).shape))


def config(extra: dict[str, Any] | None = None, **facts: Any) -> HiCacheStorageConfig:
    """One rank's configuration; `extra` is added to what every test gives."""
    given: dict[str, Any] = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1, "is_mla_model": False,
        "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "some/model",
    }  # fmt: skip
    return HiCacheStorageConfig(**given | facts, extra_config=EXTRA | (extra or {}))


def backend(address: str, host_pool: Any, extra: dict[str, Any] | None = None, **facts: Any) -> Any:
    """Our backend, made and given its pool as the engine does it."""
    made = StorageBackendFactory.create_backend("dynamic", config({"address": address} | (extra or {}), **facts), host_pool)
    made.register_mem_pool_host(host_pool)
    made.on_host_pools_registered()
    return made


def file_backend(folder: Path, host_pool: Any) -> HiCacheFile:
    """The engine's own backend on files, in the same way."""
    made = StorageBackendFactory.create_backend("file", config({"file_storage_path": str(folder)}), host_pool)
    made.register_mem_pool_host(host_pool)
    return made


def keys(count: int, seed: str = "") -> list[str]:
    """Hashes of so many pages of one chain, as the engine writes them."""
    made, parent = [], hashlib.sha256(f"prompt {seed}".encode()).digest()
    for page in range(count):
        parent = hashlib.sha256(parent + page.to_bytes(4, "little")).digest()
        made.append(parent.hex())
    return made


def page_bytes(host_pool: Any, page: int) -> bytes:
    """All bytes of one page, wherever they lie."""
    return bytes(host_pool.get_data_page(page * PAGE, flat=True).contiguous().view(torch.uint8).numpy())


def indices(*pages: int) -> Tensor:
    """The host indices of pages, one a token."""
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def controller(storage: Any, host_pool: Any, *, zero_copy: bool) -> HiCacheController:
    """The engine's own controller, as far as it moves pages between a pool and a backend: without a device, ranks or threads."""
    made = HiCacheController.__new__(HiCacheController)
    made.storage_backend, made.storage_host_pool, made.mem_pool_host = storage, host_pool, host_pool
    made.page_size = PAGE
    made.prefetch_sync_queue = Queue()
    made.page_get_func = made._page_get_zero_copy if zero_copy else made._generic_page_get
    made.page_set_func = made._page_set_zero_copy if zero_copy else made._generic_page_set
    return made


def back_up(engine: HiCacheController, hashes: list[str], host_indices: Tensor, prefix_keys: list[str] | None = None) -> int:
    """What the engine's backup thread does for one node. Returns the tokens that it takes for stored."""
    operation = StorageOperation(host_indices, [], hash_value=hashes, prefix_keys=prefix_keys)
    engine._page_backup(operation)
    return int(operation.completed_tokens)


def prefetch(engine: HiCacheController, hashes: list[str], host_indices: Tensor) -> int:
    """What the engine's prefetch thread does for one request. Returns the pages that it takes for loaded."""
    operation = PrefetchOperation("request", [])
    operation.hash_value, operation.host_indices = hashes, host_indices
    return int(engine._page_transfer(operation))
