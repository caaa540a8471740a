"""The CUDA backend without a GPU: it says what is missing, and drives a driver that runs the host shim in the GPU's place."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.errors import ConfigError, InvalidArgument
from kvstore.kernels import cuda
from kvstore.kernels.arrays import describe
from kvstore.kernels.cuda import Compiled, CudaBackend
from kvstore.kernels.variants import Variant, all_variants
from tests.kernels.fake_cupy import Device, DeviceArray, FakeCuda, not_compiled
from tests.kernels.runner import run_suite
from tests.kernels.test_decode import Simple

REAL_IMPORT = importlib.import_module


@pytest.fixture
def fake(built: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A driver with one GPU that is the host shim."""
    found = FakeCuda(built(all_variants()))
    monkeypatch.setattr(importlib, "import_module", found.modules(REAL_IMPORT))
    monkeypatch.setattr(cuda, "compile_for", not_compiled)
    return found


@pytest.mark.parametrize("suite", ["decode:bfloat16:128:4", "decode:float32:64:11", "copy", "write"])
def test_the_backend_passes_the_same_suites(fake: FakeCuda, suite: str) -> None:
    backend = CudaBackend()
    for seed in range(6):
        run_suite(backend, suite, seed)
    assert fake.launches


def test_a_kernel_is_compiled_once(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def record(variants: Sequence[Variant], capability: int) -> Compiled:
        compiled.extend(variant.name for variant in variants)
        return not_compiled(variants, capability)

    monkeypatch.setattr(cuda, "compile_for", record)
    backend = CudaBackend()
    for seed in range(8):
        run_suite(backend, "decode:float16:64:1", seed)
    assert sorted(compiled) == ["decode_f16_d64_g1", "reduce_f16_d64"]


def test_arrays_in_the_hosts_memory_are_refused(fake: FakeCuda) -> None:
    simple = Simple(np.zeros((1, 2, 64), np.float32), np.zeros((1, 2, 64), np.float32))
    backend: Any = CudaBackend()
    with pytest.raises(InvalidArgument, match="lies in this process's memory, the kernels run on a GPU's memory"):
        simple.decode(backend, np.zeros((1, 1, 64), np.float32))


def test_a_device_array_cannot_be_read_by_mistake(fake: FakeCuda) -> None:
    array = CudaBackend().upload(np.arange(6, dtype=np.float32))
    assert isinstance(array, DeviceArray)
    assert describe(array[1:]).address == describe(array).address + 4
    assert not hasattr(array, "__array_interface__")


def test_a_device_that_is_missing_or_too_old_is_refused(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="GPU 1 is not there: the driver sees 1"):
        CudaBackend(1)
    monkeypatch.setattr(Device, "compute_capability", "75")
    with pytest.raises(ConfigError, match="sm_75; the kernels need sm_80"):
        CudaBackend()


def test_without_a_gpu_it_says_so(built: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib, "import_module", FakeCuda(built(all_variants()), devices=0).modules(REAL_IMPORT))
    with pytest.raises(ConfigError, match="no GPU was found"):
        CudaBackend()


def test_without_cupy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"install kvstore\[cuda\]"):
        CudaBackend()
    with pytest.raises(ConfigError, match="CuPy cannot be loaded"):
        cuda.compile_for(all_variants(), 90)
