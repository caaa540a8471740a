"""The host shim itself: sanitizers find nothing, planted faults are caught, its parts for other machines work too."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore.errors import ConfigError, InvalidArgument
from kvstore.kernels import host
from kvstore.kernels.host import SANITIZERS, HostBackend, compiler
from kvstore.kernels.layout import DecodeArgs
from kvstore.kernels.variants import all_variants, copy_variant, decode_variant
from tests.kernels.cases import decode_case
from tests.kernels.faults import FAULTS, ROOT, outcome
from tests.kernels.runner import run_suite, variants_of
from tests.kernels.sanitizers import environment

SUITES = [*(f"decode:{dtype}:{dim}:{group}" for dtype, dim, group in (
    ("float16", 64, 1), ("bfloat16", 80, 2), ("float16", 96, 3), ("bfloat16", 128, 4), ("float16", 128, 8), ("bfloat16", 256, 8),
    ("float32", 64, 8), ("float32", 80, 1), ("float32", 96, 4), ("float32", 128, 11), ("float32", 256, 2),
)), "copy", "write"]  # fmt: skip
SEEDS = 6  # of each suite under the sanitizers
PARTS = 5  # that the planted faults are tried in, so that none of the tests is long
# What the shim itself finds, and says.
NAMED = {"a divergent shuffle": "divergent threads in block", "a thread that leaves before the barrier": "has ended"}


def test_the_sanitizers_find_nothing(built: Callable[..., Path]) -> None:
    preloaded = environment(compiler())
    library = built([variant for suite in SUITES for variant in variants_of(suite)], ("-O1", *SANITIZERS))
    command = [sys.executable, "-m", "tests.kernels.runner", str(library), "--seeds", str(SEEDS), *SUITES]
    done = subprocess.run(command, cwd=ROOT, env=preloaded, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.strip() == f"{len(SUITES) * SEEDS} passed"


@pytest.mark.parametrize("part", range(PARTS))
def test_every_planted_fault_is_caught(built: Callable[..., Path], part: int) -> None:
    faults = FAULTS[part::PARTS]
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip([fault.what for fault in faults], pool.map(outcome, faults), strict=True))
    assert [what for what, text in found.items() if not text] == []
    for what, words in NAMED.items():
        assert words in found.get(what, words)


def test_unchanged_sources_pass_what_the_faults_fail(backend: HostBackend) -> None:
    for suite in sorted({suite for fault in FAULTS for suite in fault.suites}):
        for seed in range(8):
            run_suite(backend, suite, seed)


def test_contexts_switched_by_the_library_work_as_well(built: Callable[..., Path]) -> None:
    """What a machine other than x86-64 uses."""
    suite = "decode:float16:128:4"
    other = HostBackend(built(variants_of(suite), ("-O1", "-DKV_SHIM_UCONTEXT")))
    for seed in range(2):
        run_suite(other, suite, seed)


def test_the_cases_meet_what_they_are_for() -> None:
    """Among the seeds that a planted fault is run with: several splits, windows with and without them, sinks, empty sequences."""
    cases = [decode_case(seed, "bfloat16", 128, 4) for seed in range(8)]
    split = [case for case in cases if case.splits and case.splits.count > 1]
    assert len(split) >= 3
    assert any(case.attention.window for case in split)
    assert any(not case.attention.window for case in split)
    assert any(case.attention.sink_tokens and case.sink_logits is not None for case in cases)
    assert any((case.context == 0).any() for case in cases)
    assert any(len(case.pool.arenas) > 1 for case in cases)


def test_a_kernel_that_was_not_built_is_named(built: Callable[..., Path]) -> None:
    library = HostBackend(built([copy_variant(16)], ("-O1",)))
    with pytest.raises(InvalidArgument, match="no kernel decode_f16_d64_g1"):
        library.launch(decode_variant("float16", 64, 1), (1, 1, 1), 0, DecodeArgs())


def test_a_machine_without_a_compiler_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"install g\+\+ or clang"):
        host.build(all_variants(), Path("nowhere"))
