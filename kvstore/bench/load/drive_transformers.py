"""transformers' own continuous batching, with or without its prefix sharing. Run by driver.py."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig

ANSWERS_DEADLINE_S = 1800.0  # seconds for all answers


class Peer:
    """A manager with its thread, as `generate_batch` makes one, kept over runs."""

    def __init__(self, work: dict[str, Any]) -> None:
        torch.set_num_threads(work["threads"])
        model = AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.bfloat16, attn_implementation="sdpa", local_files_only=True)
        self._work, self._runs = work, 0
        self._hit_tokens = self._preemptions = 0
        config = ContinuousBatchingConfig(
            page_size=work["page_tokens"],
            num_blocks=work["memory_bytes"] // (work["token_bytes"] * work["page_tokens"]),
            max_batch_tokens=work["step_tokens"],
            max_requests_per_batch=work["running"],
            allow_block_sharing=work["sharing"],
        )
        settings: Any = transformers.GenerationConfig
        generation = settings(do_sample=False, eos_token_id=-1, pad_token_id=0)
        with torch.inference_mode():
            self._manager: Any = model.init_continuous_batching(generation, config)
            self._manager.batch_processor = self._manager._create_batch_processor()
            self._watch()
            self._manager.start()

    def _watch(self) -> None:
        """Count what it does not tell: tokens found in its cache, and requests put off."""
        processor = self._manager.batch_processor
        cache, offloading = processor.cache, processor.offloading_manager
        search, offload = cache.search_prefix_match, offloading.offload_requests

        def searched(*arguments: Any, **named: Any) -> int:
            found: int = search(*arguments, **named)
            self._hit_tokens += found
            return found

        def offloaded(*arguments: Any, **named: Any) -> Any:
            self._preemptions += 1
            return offload(*arguments, **named)

        cache.search_prefix_match, offloading.offload_requests = searched, offloaded

    def about(self) -> dict[str, str]:
        """Version, and how it is run."""
        sharing = "on" if self._work["sharing"] else "off"
        how = f"continuous batching, sdpa, pages of {self._work['page_tokens']} tokens, prefix sharing {sharing}"
        return {"version": f"transformers {version('transformers')}", "how": how}

    def serve(self, asked: list[list[Any]]) -> dict[str, Any]:
        """See driver.py."""
        self._runs += 1
        self._hit_tokens = self._preemptions = 0
        names = [f"{self._runs}-{index}" for index in range(len(asked))]
        began_at = time.perf_counter()
        for name, (at_s, tokens, answer_tokens) in zip(names, asked, strict=True):
            time.sleep(max(0.0, began_at + at_s - time.perf_counter()))
            self._manager.add_request(tokens, name, max_new_tokens=answer_tokens, record_timestamps=True)
        found: dict[str, Any] = {}
        while len(found) < len(names):
            output = self._manager.get_result(timeout=5.0)
            if output is None:
                if not self._manager.is_running() or time.perf_counter() - began_at > ANSWERS_DEADLINE_S:
                    raise RuntimeError("transformers' batching stopped before all was answered")
            elif output.error:
                raise RuntimeError(f"transformers failed a request: {output.error}")
            else:
                found[output.request_id] = output
        answers = [
            {
                "tokens": found[name].generated_tokens,
                "token_at_s": [at - began_at for at in found[name].timestamps],
                "started_at_s": found[name].lifespan[0] - began_at,
            }
            for name in names
        ]
        return {"answers": answers, "figures": {"hit_tokens": self._hit_tokens, "preemptions": self._preemptions}, "fault": ""}

    def close(self) -> None:
        """End it."""
        self._manager.stop(block=True, hard_stop=True)


def open_engine(work: dict[str, Any]) -> Peer:
    """The engine."""
    return Peer(work)
