"""A real vLLM in a process of its own, for tests: see vllm_child.py for what it can be told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import uuid
from pathlib import Path
from typing import Any, ClassVar, Self

START_TIMEOUT_S = 180.0  # seconds: vLLM imports and starts in about 15 where it has a core to itself
ORDER_TIMEOUT_S = 120.0  # seconds: far beyond any order here
HERE = Path(__file__).resolve().parent.parent.parent
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Threads that are bound to cores and spin lose all their time to any other process there.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "PYTHONHASHSEED": "random",
    "PYTHONPATH": str(HERE),
}


def connector(address: str, module: str = "kvstore.clients.vllm", name: str = "KVStoreConnector", **extra: object) -> dict[str, Any]:
    """The three lines of configuration; without a module vLLM knows the connector as a plugin.

    The timeouts are far beyond what a loaded machine takes, unless a test gives its own.
    """
    return {
        "kv_connector": name,
        "kv_connector_module_path": module or None,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"address": address, "acquire_timeout_s": 30.0, "save_timeout_s": 60.0, **extra},
    }


class Engine:
    """Started when made, ready in its `with` block.

    transfer   the connector's configuration, None for vLLM alone;  overrides  further arguments of vLLM's LLM
    """

    environment: ClassVar[dict[str, str]] = ENVIRONMENT

    def __init__(self, model: Path, log: Path, transfer: dict[str, Any] | None, **overrides: object) -> None:
        self._log = log
        config: dict[str, object] = {
            "model": str(model),
            "dtype": "bfloat16",
            "enforce_eager": True,
            "max_model_len": 4096,
            "gpu_memory_utilization": 0.3,
            "max_num_seqs": 8,
            "disable_log_stats": False,
        }
        config |= {"kv_transfer_config": transfer} if transfer else {}
        python = os.environ["TESTS_VLLM_PYTHON"]
        with log.open("a") as out:
            self._process = subprocess.Popen(
                [python, "-m", "tests.engines.vllm_child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                cwd=HERE,
                env={**os.environ, **self.environment},
            )
        self._say(config | overrides)

    def __call__(self, do: str, **arguments: object) -> Any:
        """Give an order and wait for its answer. Raises RuntimeError where the child failed."""
        self._say({"do": do, **arguments})
        answer = self._hear(ORDER_TIMEOUT_S)
        if "error" in answer:
            raise RuntimeError(f"{do}: {answer['error']}\n{self.log()[-3000:]}")
        return answer["answer"]

    def generate(self, prompt: list[int], max_tokens: int = 8, salt: str = "", **sampling: object) -> dict[str, Any]:
        """One greedy answer; `sampling` are further settings of vLLM's SamplingParams."""
        salts = [salt] if salt else None
        answers: list[dict[str, Any]] = self("generate", prompts=[prompt], max_tokens=max_tokens, salts=salts, sampling=sampling)
        return answers[0]

    def without_store(self, prompt: list[int], cached: int, max_tokens: int = 8) -> list[int]:
        """The ids that this engine gives where the first `cached` tokens are in its own prefix cache and the rest is computed.

        Under a salt of its own, of which neither the engine nor the store knows anything.
        """
        salt = uuid.uuid4().hex
        if cached:
            self.generate(prompt[: cached + 1], 1, salt)
        answer = self.generate(prompt, max_tokens, salt)
        assert answer["cached"] == cached, f"{answer['cached']} tokens in the engine's own cache, {cached} are wanted"
        ids: list[int] = answer["ids"]
        return ids

    def send(self, do: str, **arguments: object) -> None:
        """Give an order whose answer nobody will hear: the engine is killed meanwhile."""
        self._say({"do": do, **arguments})

    def log(self) -> str:
        """What the child has written."""
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End it in order, as a server is ended."""
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
        if self._process.stdout:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        self._hear(START_TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _say(self, message: object) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(f"the engine ended:\n{self.log()[-6000:]}") from None

    def _hear(self, timeout_s: float) -> Any:
        assert self._process.stdout
        stuck = threading.Timer(timeout_s, self.kill)
        stuck.start()
        try:
            line = self._process.stdout.readline()
        finally:
            stuck.cancel()
        if not line:
            raise RuntimeError(f"the engine ended, or did not answer in {timeout_s} s:\n{self.log()[-6000:]}")
        return json.loads(line)
