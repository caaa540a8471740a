"""`make test-gpu`: on a real GPU the kernels' checks, memory shared by processes, workers over a daemon, and the benchmark, in one JSON.

Not yet run on a GPU; rehearsed without one.

    python -m tests.kernels.gpu --json gpu.json

Exit status 0 if all passed, 1 if a check failed (the JSON says which), 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvstore.bench import kernels
from kvstore.bench.kernel_roofline import GPUS, Shape
from kvstore.errors import ConfigError, KVStoreError
from kvstore.kernels.backend import Backend
from kvstore.kernels.cuda import CudaBackend
from kvstore.kernels.driver import CudaDriver, LibCuda
from kvstore.kernels.variants import ELEMENTS, HEAD_DIMS, all_variants
from kvstore.testing.daemon import DaemonProcess
from tests.kernels.cases import check_decode, decode_case
from tests.kernels.runner import run_suite
from tests.tiers.hbm_owner import check_sharing
from tests.worker.gpu.check import POOL_BYTES, check_workers
from tests.worker.gpu.models import KINDS as MODELS

GROUPS = (1, 2, 3, 4, 7, 8, 11)
SUITES = [*(f"decode:{dtype}:{dim}:{group}" for dtype in ELEMENTS for dim in HEAD_DIMS for group in GROUPS), "copy", "write"]
LONG_TOKENS = (5_000, 40_000)  # tokens of the longest contexts: many splits
SEEDS = 6  # of each suite: two minutes at most, nearly all of it in numpy
# Not the one with experts: those have no kernels for float32 on a GPU.
WORKER_MODELS = [name for name, (config, _) in MODELS.items() if config != "GptOssConfig"]
MOST_FAILURES = 20  # that are written down


def check(backend: Backend, suites: Sequence[str], seeds: int, long_tokens: Sequence[int]) -> dict[str, Any]:
    """Run them all; how many passed, and what failed."""
    failed: list[str] = []
    passed = 0

    def attempt(name: str, act: Any) -> None:
        nonlocal passed
        try:
            act()
            passed += 1
        except (AssertionError, KVStoreError, RuntimeError) as error:  # a CUDA error is CuPy's, a RuntimeError
            failed.append(f"{name}: {type(error).__name__}: {error}")

    for suite in suites:
        for seed in range(seeds):
            attempt(f"{suite}, seed {seed}", lambda suite=suite, seed=seed: run_suite(backend, suite, seed))
    for tokens in long_tokens:
        for seed in (2, 6):  # splits as they are chosen, all tokens visible
            attempt(
                f"{tokens} tokens, seed {seed}",
                lambda tokens=tokens, seed=seed: check_decode(backend, decode_case(seed, "bfloat16", 128, 4, longest=tokens)),
            )
    return {"passed": passed, "failed": len(failed), "failures": failed[:MOST_FAILURES]}


def shared(driver: Callable[[], CudaDriver], *flags: str) -> dict[str, Any]:
    """Two processes share GPU memory, and one goes on after the other was killed; or why not."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return check_sharing(driver(), Path(folder) / "hbm-0.sock", *flags)
        except (AssertionError, KVStoreError, OSError) as error:
            return {"shared": False, "failure": f"{type(error).__name__}: {error}"}


def workers(daemon: Callable[[], DaemonProcess], models: Sequence[str], *flags: str) -> dict[str, Any]:
    """Worker processes over a real daemon's pool, killed in the middle; or what failed."""
    try:
        with daemon() as running:
            return check_workers(running, models, *flags)
    except (AssertionError, KVStoreError, OSError, RuntimeError) as error:
        return {"passed": False, "failure": f"{type(error).__name__}: {error}"}


@dataclass(frozen=True)
class Work:
    """What to check and to measure."""

    suites: Sequence[str]
    seeds: int
    long_tokens: Sequence[int]
    shapes: Sequence[Shape]
    share: Callable[[], dict[str, Any]]
    work: Callable[[], dict[str, Any]]


def run(path: Path, work: Work) -> int:
    """Check, measure, write the JSON; returns the exit status."""
    try:
        backend = CudaBackend()
    except ConfigError as error:
        print(f"make test-gpu needs a GPU: {error}", file=sys.stderr)
        return 2
    began = time.monotonic()
    backend.prepare(all_variants())
    figures: dict[str, Any] = {"compile_s": time.monotonic() - began}
    figures["checks"] = check(backend, work.suites, work.seeds, work.long_tokens)
    figures["sharing"] = work.share()
    figures["workers"] = work.work()
    figures["check_s"] = time.monotonic() - began - figures["compile_s"]
    failed = figures["checks"]["failed"] + (not figures["sharing"]["shared"]) + (not figures["workers"]["passed"])
    print(f"{figures['checks']['passed']} passed, {failed} failed", *figures["checks"]["failures"], sep="\n")
    print(figures["sharing"], figures["workers"], sep="\n")
    if not failed:
        figures["bench"] = kernels.report(work.shapes, GPUS["h100"], 0)
    figures["all_s"] = time.monotonic() - began
    path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 1 if failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    """All checks and the whole benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="where the figures go")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of each suite")
    args = parser.parse_args(argv)
    work = partial(workers, lambda: DaemonProcess(flags=["--hbm", POOL_BYTES], nvme=False), WORKER_MODELS, "--real")
    return run(args.json, Work(SUITES, args.seeds, LONG_TOKENS, kernels.shapes(), lambda: shared(LibCuda), work))


if __name__ == "__main__":
    sys.exit(main())
