"""The child process of engine.py: a real vLLM, in this one process, that does what it is told over its standard input.

One JSON object a line in, one a line out: {"do": <name of a function below>, ...its arguments}. Runs in vLLM's own venv.
"""

import dataclasses
import hashlib
import json
import os
import random
import sys
import time
from typing import Any

from tests.engines.vllm_configured import Configured

Answer = Any


class Child(Configured):
    """`config` is what LLM() gets."""

    def __init__(self, config: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVEventsConfig

        if "kv_events_config" in config:
            config["kv_events_config"] = KVEventsConfig(**config["kv_events_config"])
        self.llm = LLM(**config)
        self.socket: Any = None
        self.preempted = 0
        client = self.llm.llm_engine.engine_core
        if hasattr(client, "engine_core"):  # in this process
            self._look_into(client.engine_core)

    def _look_into(self, core: Any) -> None:
        self.scheduler = core.scheduler
        preempt = self.scheduler._preempt_request

        def counted(*arguments: Any, **named: Any) -> Any:
            self.preempted += 1
            return preempt(*arguments, **named)

        self.scheduler._preempt_request = counted

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        salts: list[str] | None = None,
        lora: dict[str, str] | None = None,
        sampling: dict[str, Any] | None = None,
    ) -> Answer:
        """Greedy answers: ids, how many tokens were cached, seconds to the first token."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        inputs = [{"prompt_token_ids": ids} | ({"cache_salt": salts[at]} if salts else {}) for at, ids in enumerate(prompts)]
        adapter = LoRARequest(lora["name"], int(lora["id"]), lora["path"]) if lora else None
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **sampling or {})
        outs = self.llm.generate(inputs, params, use_tqdm=False, lora_request=adapter)
        return [
            {
                "ids": list(out.outputs[0].token_ids),
                "cached": out.num_cached_tokens,
                "ttft_s": out.metrics.first_token_latency,
                "reason": out.outputs[0].finish_reason,
            }
            for out in outs
        ]

    def settle(self) -> Answer:
        """Run steps until the engine has nothing left to do: saves of requests that have ended, too. How long that took."""
        began_at = time.monotonic()
        while self.scheduler.has_requests() and time.monotonic() - began_at < 60:
            self.llm.llm_engine.step()
        return time.monotonic() - began_at

    def reset(self, connector: bool = False) -> Answer:
        """Forget the engine's own prefix cache, and on demand tell the connector that weights may have changed."""
        return self.llm.reset_prefix_cache(reset_connector=connector)

    def usage(self) -> Answer:
        """What the engine and the connector hold."""
        connector = self.scheduler.connector
        return {
            "blocks": self.scheduler.kv_cache_manager.usage,
            "requests": len(self.scheduler.requests),
            "tracked": len(connector._scheduler._tracked) if connector else 0,
        }

    def preemptions(self) -> Answer:
        """How often a request was put off so far, over all requests that this child has seen."""
        return self.preempted

    def stats(self, prefix: str = "vllm:kvstore_") -> Answer:
        """What has been counted so far, as vLLM's Prometheus page shows it; by default by the connector."""
        from prometheus_client import REGISTRY

        page = {sample.name: sample.value for family in REGISTRY.collect() for sample in family.samples}
        return {name: value for name, value in page.items() if name.startswith(prefix) and name.endswith("_total")}

    def events(self, endpoint: str) -> Answer:
        """What the engine has published on its KV event socket since this was last asked, from the first time on."""
        import msgspec
        import zmq
        from vllm.distributed.kv_events import KVEventBatch

        if self.socket is None:
            self.socket = zmq.Context.instance().socket(zmq.SUB)
            self.socket.connect(endpoint)
            self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
        events: list[dict[str, Any]] = []
        while self.socket.poll(200):
            for event in decoder.decode(self.socket.recv_multipart()[-1]).events:
                facts = {name: getattr(event, name) for name in event.__struct_fields__}
                events.append({"kind": type(event).__name__, **facts})
        return events

    def stored(self, prompt: list[int], salt: str = "", group: int = 0) -> Answer:
        """The SHA-256 of each block of a prompt that the store has of a KV cache group, in order."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from kvstore.clients.client import KVClient
        from kvstore.clients.vllm_facts import members_of
        from kvstore.hashing import HASH_BYTES, block_hashes, fingerprint

        worker = get_kv_transfer_group()
        with KVClient(worker._settings.address) as client:
            of = members_of(worker._identity, [worker._facts])[group]
            namespace = client.open_namespace(of.identity, of.geometry, of.shard, of.kv_group, of.keep)
            root = fingerprint(dataclasses.replace(worker._identity, salt=salt))
            hashes = block_hashes(root, prompt, of.geometry.block_tokens)
            found: list[str] = []
            for start in range(0, len(hashes), HASH_BYTES):  # each by itself: of a window only what it looks at is leased
                with client.get(namespace, hashes[start : start + HASH_BYTES]) as lease:
                    found += [hashlib.sha256(view.tobytes()).hexdigest() for view in lease.views]
            return found

    def hear(self, chunks: int) -> Answer:
        """Wait until the tier of an offloading engine has heard of at least so many chunks in the store; of none, where none is wanted."""
        tier = self.scheduler.connector.connector_scheduler.manager.secondary_tiers[0]
        deadline_at = time.monotonic() + 30
        while len(tier._presence) < chunks or (chunks == 0 and len(tier._presence)):
            if time.monotonic() > deadline_at:
                raise TimeoutError(f"heard of {len(tier._presence)} chunks")
            time.sleep(0.05)
        return None

    def partial(self) -> Answer:
        """Store chunks under keys of one's own, all but the third, and load all four; what came of it, what is promised then, what is told.

        In the last rows of the tier's memory, which the engine does not use so early.
        """
        import numpy as np
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.base import TransferJob

        tier = self.scheduler.connector.connector_scheduler.manager.secondary_tiers[0]
        keys = [hashlib.sha256(bytes([number])).digest() + bytes(4) for number in range(4)]
        end, mine, other = len(tier._chunks), ReqContext("mine"), ReqContext("other")
        sources, targets = np.arange(end - 4, end), np.arange(end - 8, end - 4)
        tier._chunks[sources] = np.random.default_rng(1).integers(0, 256, (4, tier.block_size_bytes), np.uint8)
        tier._chunks[targets] = 0
        kept = [0, 1, 3]

        def told() -> Any:
            return [[event.removed, [keys.index(key) for key in event.keys if key in keys]] for event in tier.take_events()]

        told()
        tier.submit_store(TransferJob(-1, [keys[at] for at in kept], sources[kept], False, mine))
        tier.drain_copies()
        stored = list(tier.get_finished_jobs())
        events = told()
        self.hear(len(tier._presence) + 3 - sum(tier.lookup(key, other).name == "HIT" for key in keys))
        tier.submit_load(TransferJob(-2, keys, targets, True, mine))
        tier.drain_copies()
        loaded = list(tier.get_finished_jobs())
        answer = {
            "stored": [result.success for result in stored],
            "loaded": [[result.success, [keys.index(key) for key in result.successful_keys]] for result in loaded],
            "right": [bool((tier._chunks[target] == tier._chunks[source]).all()) for source, target in zip(sources, targets, strict=True)],
            "mine": [tier.lookup(key, mine).name for key in keys],
            "other": [tier.lookup(key, other).name for key in keys],
        }
        tier._client.clear()
        self.hear(0)
        return answer | {"events": events + [[removed, sorted(which)] for removed, which in told()]}

    def stale(self) -> Answer:
        """Store a chunk, after a reset, for a request that began before it, and then for another: whether each was, and found since."""
        import numpy as np
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.base import TransferJob

        tier = self.scheduler.connector.connector_scheduler.manager.secondary_tiers[0]
        key, chunk, before, after = hashlib.sha256(b"stale").digest() + bytes(4), np.array([len(tier._chunks) - 1]), *map(ReqContext, "ab")
        tier.lookup(key, before)
        tier.drain_jobs()
        answer = []
        for number, request in enumerate((before, after)):
            had = len(tier._presence)
            tier.submit_store(TransferJob(-10 - number, [key], chunk, False, request))
            tier.drain_copies()
            stored = [result.success for result in tier.get_finished_jobs()]
            self.hear(had + 1 if stored[0] else had)
            answer.append([stored, tier.lookup(key, request).name])
        return answer

    def fail(self, blocks: list[int], every: int = 1, slow_s: float = 0.0) -> Answer:
        """From now on the loads of these blocks of each `every`th load fail, and all take so long (see faulty.py)."""
        from tests.engines import faulty

        faulty.fail_at[:] = blocks
        faulty.every, faulty.slow_s = every, slow_s
        return None

    def limit(self, **settings: float) -> Answer:
        """From now on the connector has these settings."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        for half in (self.scheduler.connector._scheduler.lookups, get_kv_transfer_group()._worker):
            half._settings = dataclasses.replace(half._settings, **settings)
        return None

    def storm(self, prompts: list[list[int]], requests: int, seed: int, tokens: int) -> Answer:
        """So many requests for some of these prompts, each aborted at a random moment or left to end.

        Of those that ended: which prompt, and the answer's ids.
        """
        from vllm import SamplingParams

        chance = random.Random(seed)
        engine = self.llm.llm_engine
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        ended: list[tuple[int, list[int]]] = []
        which: dict[str, int] = {}
        aborting: dict[str, int] = {}
        step = 0
        while len(which) < requests or engine.has_unfinished_requests():
            while len(which) < requests and engine.get_num_unfinished_requests() < 6:
                request = f"storm-{len(which)}"
                which[request] = chance.randrange(len(prompts))
                engine.add_request(request, {"prompt_token_ids": prompts[which[request]]}, params)
                if chance.random() < 0.7:
                    aborting[request] = step + chance.randrange(8)
            due = [request for request, at in aborting.items() if at <= step]
            for request in due:
                del aborting[request]
            engine.abort_request(due)
            done = [out for out in engine.step() if out.finished and out.outputs[0].finish_reason != "abort"]
            ended += [(which[out.request_id], list(out.outputs[0].token_ids)) for out in done]
            step += 1
        return ended


def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints goes to the log
    child = Child(json.loads(sys.stdin.readline()))
    answers.write(json.dumps("ready") + "\n")
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = {"answer": getattr(child, order.pop("do"))(**order)}
        except Exception as error:  # noqa: BLE001 — the parent raises it
            answer = {"error": repr(error)}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
