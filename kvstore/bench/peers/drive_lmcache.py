"""LMCache's server, with the client that its own benchmark uses, on processors: paged KV tensors, copied through shared memory.

Run by driver.py in a venv of its own.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lmcache.cli.commands.bench.server_bench.client import RequestContext, ServerBenchClient
from lmcache.cli.commands.bench.server_bench.config import BenchConfig
from lmcache.cli.commands.bench.server_bench.helpers import _make_key, _send_lookup

CHUNK_TOKENS = 256  # tokens that it keeps as one: its default
# What was fastest for it where all were tried: engine_driven before lmcache_driven, zmq before grpc (its lookups take a third).
TRANSPORT, MODE = "zmq", "engine_driven"
L1_FACTOR = 1.25  # times the bytes that are stored at once: below its mark for eviction
QUIET = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_LOG_LEVEL": "WARNING"}
ANSWER_LIMIT_S = 5.0  # seconds until a lookup that is not answered counts as failed


class LMCache:
    """One worker with a paged cache of as many blocks as the work has: the whole of it is stored, and retrieved in place."""

    def __init__(self, work: dict[str, Any], servers: Any) -> None:
        self._work = work
        size_bytes = work["blocks"] * work["block_bytes"]
        port, http, metrics = servers.free_port(), servers.free_port(), servers.free_port()
        flags = ["--transport", TRANSPORT, "--host", "127.0.0.1", "--port", str(port), "--http-port", str(http)]
        flags += ["--http-host", "127.0.0.1", "--prometheus-port", str(metrics)]
        flags += ["--l1-size-gb", f"{L1_FACTOR * size_bytes / 1e9 + 0.25:.2f}"]
        flags += ["--eviction-policy", "LRU", "--supported-transfer-mode", MODE, "--chunk-size", str(CHUNK_TOKENS)]
        name = f"kvstore-peer-{os.getpid()}"
        flags += ["--shm-name", name]
        servers.leftovers.append(Path("/dev/shm") / f"lmcache_l1_pool_{name}")
        servers.start([servers.program("lmcache"), "server", *flags], lambda: servers.listens(port) and servers.listens(http), QUIET)
        shape = f"(2,{work['blocks']},{work['block_tokens']},{work['kv_heads']},{work['head_dim']}):float16:{work['layers']}"
        self._client = ServerBenchClient(
            BenchConfig(
                rpc_url=f"tcp://127.0.0.1:{port}",
                http_url=f"http://127.0.0.1:{http}",
                mode="cpu",
                transfer_mode=MODE,
                tp_size=1,
                use_mla=False,
                num_tokens=work["blocks"] * work["block_tokens"] - 1,  # it puts a first one before them
                kvcache_shape_spec=shape,
                num_blocks=work["blocks"],
                block_size=work["block_tokens"],
            ),
            log=lambda text: print(text, file=sys.stderr),
        )
        self._client.start()
        self._asked = 0

    def about(self) -> dict[str, str]:
        how = f"{MODE}, shared memory, {TRANSPORT}, chunks of {CHUNK_TOKENS} tokens"
        return {"version": f"lmcache {version('lmcache')}, torch {torch.__version__}", "how": how}

    def _request(self, turn: int) -> RequestContext:
        self._asked += 1
        request = self._client.create_request(turn, f"request-{turn}-{self._asked}", "bench")
        if request is None:
            raise RuntimeError("the work is shorter than a chunk")
        return request

    def store(self, turn: int, per_object: int) -> float:
        request = self._request(turn)
        began = time.perf_counter()
        result = self._client.store(request, 0, request.num_full_tokens)
        seconds = time.perf_counter() - began
        self._client.end_session(request)
        if result is None or not result.succeeded:
            raise RuntimeError(f"the store failed: {result}")
        return seconds

    def retrieve(self, turn: int, per_object: int, *, into_buffer: bool) -> float:
        request = self._request(turn)
        _, found = self._lookup(request)  # takes the locks that the retrieve gives back; not timed
        if found != request.total_chunks:
            raise RuntimeError(f"{found} of {request.total_chunks} chunks were found")
        began = time.perf_counter()
        result = self._client.retrieve(request, 0, request.num_full_tokens)
        seconds = time.perf_counter() - began
        self._client.end_session(request)
        if result is None or not result.succeeded:
            raise RuntimeError(f"the retrieve failed: {result}")
        return seconds

    def _lookup(self, request: RequestContext) -> tuple[float, int]:
        """As its own client does, except that it asks for the answer again at once where that is not ready, without a pause."""
        channel = self._client._require_started()
        began = time.perf_counter()
        key = _make_key(request.token_ids, request.request_id, start=0, end=request.num_full_tokens, world_size=1)
        if not _send_lookup(channel, key):
            raise RuntimeError("the lookup was not answered")
        while (found := channel.query_prefetch_status(key.request_id).result(timeout=ANSWER_LIMIT_S)) is None:
            if time.perf_counter() - began > ANSWER_LIMIT_S:
                raise RuntimeError("the lookup did not end")
        return time.perf_counter() - began, int(found)

    def lookup(self, turn: int, per_object: int) -> tuple[float, int]:
        request = self._request(turn)
        seconds, found = self._lookup(request)
        key = _make_key(request.token_ids, request.request_id, start=0, end=request.num_full_tokens, world_size=1)
        channel = self._client._require_started()
        channel.free_lookup_locks(key, 1).result(timeout=ANSWER_LIMIT_S)
        self._client.end_session(request)
        return seconds, found * CHUNK_TOKENS // int(self._work["block_tokens"])

    def _tensors(self) -> list[torch.Tensor]:
        return list(self._client._workers[0].kv_caches.values())

    def digest(self) -> str:
        whole = hashlib.sha256()
        for tensor in self._tensors():
            whole.update(tensor.view(torch.uint8).numpy().data.cast("B"))
        return whole.hexdigest()

    def wipe(self) -> None:
        for tensor in self._tensors():
            tensor.zero_()

    def clear(self) -> None:
        self._client._require_started().clear(True).result(timeout=ANSWER_LIMIT_S)

    def close(self) -> None:
        self._client.close()


def open_peer(work: dict[str, Any], servers: Any) -> LMCache:
    """A server, a client and its paged tensors."""
    return LMCache(work, servers)
