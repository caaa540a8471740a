"""SGLang's third cache level in the store: a storage backend of HiCache. docs/engines/sglang.md says how it is configured.

A page of the engine's host pool is a block, opaque, under the engine's own chain of hashes. Any thread of the engine's may call; what may
block: reads of pages that come up from the disk, and a daemon that hangs, under deadlines. Nothing here raises while requests are served:
what cannot be read is a miss, what cannot be stored is reported not stored. What can never be shared is refused with its pool.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from torch import Tensor

from kvstore.clients.arena import Bytes
from kvstore.clients.client import GET_TIMEOUT_S, KVClient
from kvstore.clients.handles import Namespace
from kvstore.clients.patience import TROUBLE, Patience, Warnings
from kvstore.clients.sglang_facts import Facts, facts_of, single_pool, unknown_options
from kvstore.errors import ConfigError, InvalidArgument, KVStoreError
from kvstore.hashing import fingerprint, opaque_block_hash

SCHEME = "sglang/sha256"  # how the engine hashes pages: a chain over token ids, its first parent the request's salt and adapter
STORED = ("stored", "exists")

log = logging.getLogger("kvstore.sglang")


class HiCacheKVStore(HiCacheStorage):
    """Made by the engine for each rank, from `--hicache-storage-backend dynamic`. Attaches to the daemon at the first call."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        """storage_config: the engine's HiCacheStorageConfig; its extra_config holds our options. Raises ConfigError for bad ones."""
        extra = storage_config.extra_config or {}
        self._config = storage_config
        self._address = extra.get("address")
        self._timeout_s = _seconds(extra.get("timeout_s", GET_TIMEOUT_S))
        self._patience = Patience(log)
        self._warnings = Warnings(log)
        self._opening = threading.Lock()
        self._client: KVClient | None = None
        self._space: Namespace | None = None
        self._facts: Facts | None = None
        if strange := unknown_options(extra):
            log.warning("options that nobody reads in the extra config: %s", ", ".join(strange))

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the pool whose pages are stored. Raises ConfigError, which ends the attaching, for what can never be shared."""
        pool = single_pool(mem_pool_host)
        self._facts = facts_of(self._config, pool, _arguments(), _version())
        self._space = None
        self.mem_pool_host = mem_pool_host
        self._pool = pool

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """The engine names each pool of a hybrid model. Raises ConfigError for any beside the one that is stored."""
        if host_pool is not getattr(self, "_pool", None):
            raise ConfigError(f"pool {host_pool_name}: only a model with one pool, of full attention, can be shared; attach no backend")

    # ---- pages by their buffers, without a copy between (interface_v1)

    def batch_get_v1(self, keys: list[str], host_indices: Tensor, extra_info: Any = None) -> list[bool]:
        """Read pages into the pool. True for each that is there now, whole; none is looked for behind the first that is missing."""
        try:
            loaded = self._load(keys, self._page_buffers(keys, host_indices))
        except KVStoreError as error:
            loaded = self._failed("read", error)
        return [which < loaded for which in range(len(keys))]

    def batch_set_v1(self, keys: list[str], host_indices: Tensor, extra_info: Any = None) -> list[bool]:
        """Store pages of the pool. True for each that anybody finds from now on."""
        try:
            return self._save(keys, self._page_buffers(keys, host_indices), extra_info)
        except KVStoreError as error:
            self._failed("written", error)
            return [False] * len(keys)

    # ---- flat pages, by copies that the engine makes

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Tensor | None]:
        """Read pages into these flat tensors, and return them; None from the first one on that is missing."""
        try:
            targets = [self._pool.get_dummy_flat_data_page() for _ in keys] if target_locations is None else list(target_locations)
            loaded = self._load(keys, [self._flat(target) for target in targets])
        except KVStoreError as error:
            targets, loaded = [None] * len(keys), self._failed("read", error)
        return [target if which < loaded else None for which, target in enumerate(targets)]

    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        """Store flat pages. True where anybody finds all of them from now on."""
        try:
            return all(self._save(keys, [self._flat(value) for value in values or ()], None))
        except KVStoreError as error:
            return bool(self._failed("written", error))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Tensor | None:
        """Read one page; see batch_get."""
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store one page; see batch_set."""
        return self.batch_set([key], [value])

    # ---- what is there

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many leading pages are stored. They may be gone when they are read: then the read says so."""
        try:
            client, space = self._opened()
            return client.lookup(space, self._hashes(keys)).blocks
        except KVStoreError as error:
            return self._failed("looked for", error)

    def exists(self, key: str) -> bool:
        """Whether a page is stored."""
        return self.batch_exists([key]) == 1

    def clear(self) -> None:
        """Forget every page of this model and layout, in every tier, for good and for everybody. Raises KVStoreError where that failed."""
        client, space = self._opened()
        client.clear(space)

    def close(self) -> None:
        """End the session. Idempotent."""
        with self._opening:
            client, self._client, self._space = self._client, None, None
        if client is not None:
            client.close()

    # ----

    def _opened(self) -> tuple[KVClient, Namespace]:
        """The client and the namespace; made by the process that uses them, for grpc does not survive a fork."""
        with self._opening:
            self._patience.check()  # also for those who waited here while another thread found the store in trouble
            if self._facts is None:
                raise InvalidArgument("no host pool is registered yet; register_mem_pool_host comes first")
            if self._client is None:
                self._client = KVClient(self._address, name=f"sglang/{self._facts.identity.model}")
            if self._space is None:
                try:
                    self._space = self._client.open_namespace(self._facts.identity, self._facts.geometry, self._facts.shard)
                except TROUBLE as error:
                    self._patience.excuse(error)
                    raise
            return self._client, self._space

    def _load(self, keys: Sequence[str], targets: Sequence[Sequence[Bytes]]) -> int:
        """Read leading pages into `targets`, a page's buffers each. Returns how many are whole."""
        client, space = self._opened()
        with client.get(space, self._hashes(keys), timeout_s=self._timeout_s) as lease:
            for view, buffers in zip(lease.views, targets, strict=False):
                at = 0
                for buffer in buffers:
                    np.copyto(buffer, view[at : at + len(buffer)])
                    at += len(buffer)
            lease.check()
            return lease.blocks

    def _save(self, keys: Sequence[str], sources: Sequence[Sequence[Bytes]], extra_info: Any) -> list[bool]:
        """Store pages that are not stored yet. One that somebody else is writing now is not stored yet."""
        if len(sources) != len(keys):
            raise InvalidArgument(f"{len(sources)} pages for {len(keys)} keys; give one for each")
        client, space = self._opened()
        before = getattr(extra_info, "prefix_keys", None)
        with client.put(space, self._hashes(keys), self._hashes(before[-1:]) if before else None) as put:
            for block in put.blocks:
                view, at = block.view, 0
                for buffer in sources[block.index]:
                    view[at : at + len(buffer)] = buffer
                    at += len(buffer)
                block.done()
        return [name in STORED for name in put.names]

    def _hashes(self, keys: Sequence[str]) -> bytes:
        facts = self._facts
        if facts is None:
            raise InvalidArgument("no host pool is registered yet; register_mem_pool_host comes first")
        root = fingerprint(facts.identity)
        return b"".join(opaque_block_hash(root, SCHEME, key.encode()) for key in keys)

    def _page_buffers(self, keys: Sequence[str], host_indices: Tensor) -> list[list[Bytes]]:
        """Each page's buffers in the pool, as the engine lists them."""
        facts = self._facts
        if facts is None or not facts.buffers:
            raise InvalidArgument("pages are not taken by their buffers; register a pool, with interface_v1 in the extra config")
        pages = len(keys)
        if len(host_indices) != pages * facts.geometry.block_tokens:
            raise InvalidArgument(f"{len(host_indices)} indices for {pages} pages; give {facts.geometry.block_tokens} a page, one a token")
        if not keys:
            return []
        buffers = [_memory(*each) for each in zip(*self._pool.get_page_buffer_meta(host_indices), strict=True)]
        count = len(buffers) // pages
        return [buffers[at : at + count] for at in range(0, len(buffers), count)]

    def _flat(self, page: Any) -> list[Bytes]:
        facts = self._facts
        if facts is None or facts.buffers:
            raise InvalidArgument("pages are not taken flat; register a pool, without interface_v1 in the extra config")
        if not isinstance(page, Tensor) or not page.is_contiguous() or page.numel() * page.element_size() != facts.geometry.block_bytes:
            raise InvalidArgument(f"a flat page is a contiguous tensor of {facts.geometry.block_bytes} bytes; give the pool's own")
        return [page.view(torch.uint8).numpy()]

    def _failed(self, what: str, error: KVStoreError) -> int:
        """A page was not read or stored: log why, once in a while. Returns 0, for no page."""
        if isinstance(error, TROUBLE):
            self._patience.excuse(error)
        else:
            self._warnings.say(f"pages were not {what}", error)
        return 0


def _memory(address: int, size_bytes: int) -> Bytes:
    """Memory of the engine's pool, which outlives its backend."""
    return np.frombuffer(memoryview((ctypes.c_uint8 * int(size_bytes)).from_address(int(address))), np.uint8)


def _seconds(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 60:
        raise ConfigError(f"timeout_s is {value!r}; give seconds from 0 to 60")
    return float(value)


def _version() -> str:
    from sglang.version import __version__

    return str(__version__)


def _arguments() -> Any | None:
    """The engine's settings, or None where this version of it does not let them be read."""
    try:
        from sglang.srt.runtime_context import get_server_args

        return get_server_args()
    except (ImportError, ValueError):
        return None
