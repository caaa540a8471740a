"""`make test-gpu` and `kvstore bench kernels`, rehearsed: the host shim in the GPU's place, small shapes, few rounds."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvstore.bench import kernel_measure, kernels
from kvstore.bench.kernel_roofline import GPUS, Shape, layers_past_cache, predict_copy, predict_decode, splits_of
from kvstore.cli.main import main
from kvstore.errors import ConfigError
from kvstore.kernels import cuda
from kvstore.kernels.driver import CudaDriver
from kvstore.kernels.variants import all_variants
from kvstore.testing import fake_cuda
from kvstore.testing.daemon import DaemonProcess
from kvstore.testing.fake_gpu_daemon import GpuDaemon
from tests.kernels import gpu
from tests.kernels.fake_cupy import FakeCuda, not_compiled
from tests.kernels.gpu import Work
from tests.worker.gpu.check import POOL_BYTES


def driver_of_fake() -> CudaDriver:
    """In libcuda's place."""
    return fake_cuda.FakeCuda()


def no_driver() -> CudaDriver:
    """A machine without one."""
    raise ConfigError("no driver")


def no_daemon() -> dict[str, Any]:
    """A daemon that does not start."""

    def refuse() -> DaemonProcess:
        raise RuntimeError("no daemon")

    return gpu.workers(refuse, ["gpu-llama"])


SMALL = [Shape("small", 8, 2, 64, 2, 2, 64), Shape("large", 8, 2, 64, 2, 64, 1 << 20)]
EIGHT_B = Shape("llama-3-8b", 32, 8, 128, 32, 16, 8192)
REAL_IMPORT = importlib.import_module


@pytest.fixture
def fake(built: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A driver with one GPU that is the host shim; little is measured."""
    found = FakeCuda(built(all_variants()))
    monkeypatch.setattr(importlib, "import_module", found.modules(REAL_IMPORT))
    monkeypatch.setattr(cuda, "compile_for", not_compiled)
    monkeypatch.setattr(kernel_measure, "ROUNDS", 2)
    monkeypatch.setattr(kernel_measure, "WARM_UP", 1)
    return found


def test_the_script_checks_measures_and_writes_one_json(fake: FakeCuda, tmp_path: Path) -> None:
    workers = partial(gpu.workers, lambda: GpuDaemon(hbm=POOL_BYTES, nvme=False), ["gpu-llama", "gpu-windows"])
    work = Work(["decode:bfloat16:64:4", "copy", "write"], 1, [300], SMALL, lambda: gpu.shared(driver_of_fake, "--fake"), workers)
    assert gpu.run(tmp_path / "gpu.json", work) == 0
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["checks"] == {"passed": 5, "failed": 0, "failures": []}
    assert found["sharing"] == {"shared": True, "outlives_its_owner": True}
    graphs = found["workers"].pop("graphs")
    assert found["workers"] == {"passed": True, "models": 2, "shared_tokens": 56, "lifted_blocks": 7}
    assert (graphs["off"], graphs["replayed"] > graphs["recorded"] > 0) == ("", True)
    small, large = found["bench"]["decode"]
    assert found["bench"]["measured"]
    assert small["measured"]["seconds"] > 0
    assert math.isclose(small["measured"]["kv_bytes_per_s"] * small["measured"]["seconds"], small["kv_bytes"])
    assert "needs" in large["measured"]["left_out"]
    assert set(small["peers"]) == {"torch_sdpa", "flash_attention", "flashinfer"}
    assert "has no CUDA" in small["peers"]["torch_sdpa"]["left_out"]
    assert "flash_attn" in small["peers"]["flash_attention"]["left_out"]
    assert {line["model"] for line in found["bench"]["copy"]} == set(kernels.MODELS)
    eight, seventy = (line["measured"] for line in found["bench"]["copy"])
    assert eight["gather_of_copy"] > 0
    assert "three times" in seventy["left_out"]
    assert {"copy_16", "write_16", "decode_bf16_d64_g4"} <= set(fake.launches)


def test_a_failed_check_is_named_and_nothing_is_measured(fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake.driver, "launchKernel", lambda *_: None)  # a driver that does nothing
    work = Work(["decode:bfloat16:64:4", "write"], 1, [], SMALL, lambda: gpu.shared(no_driver), no_daemon)
    assert gpu.run(tmp_path / "gpu.json", work) == 1
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["checks"]["failed"] == 2
    assert "decode:bfloat16:64:4, seed 0" in found["checks"]["failures"][0]
    assert "ConfigError: no driver" in found["sharing"]["failure"]
    assert found["workers"] == {"passed": False, "failure": "RuntimeError: no daemon"}
    assert "bench" not in found


def test_without_a_gpu_the_script_says_so(
    built: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib, "import_module", FakeCuda(built(all_variants()), devices=0).modules(REAL_IMPORT))
    assert gpu.main(["--json", str(tmp_path / "gpu.json")]) == 2
    assert "needs a GPU: no GPU was found" in capsys.readouterr().err
    assert not (tmp_path / "gpu.json").exists()


def test_the_command_predicts_every_shape_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", "--predict-only", "--gpu", "h200", "--json", str(tmp_path / "k.json")]) == 0
    found = json.loads((tmp_path / "k.json").read_text())
    assert len(found["decode"]) == len(kernels.shapes())
    assert not found["measured"]
    assert all(line["measured"] is None and line["predicted"]["seconds"] > 0 for line in found["decode"])
    text = capsys.readouterr().out
    assert "not measured: not asked for" in text
    assert "H200" in text


def test_a_prediction_counts_each_byte_of_keys_and_values_once() -> None:
    h100 = GPUS["h100"]
    found = predict_decode(EIGHT_B, h100)
    assert EIGHT_B.kv_bytes == 16 * 8192 * 8 * 128 * 2 * 2
    assert EIGHT_B.kv_bytes < found.moved_bytes < 1.01 * EIGHT_B.kv_bytes
    assert found.memory_s == found.moved_bytes / h100.bytes_per_s
    assert found.operations > 2 * 16 * 8192 * 32 * 128
    assert found.bound == "memory"
    many = predict_decode(Shape("mha-like", 64, 2, 128, 1, 1, 4096), h100)
    assert many.moved_bytes > 4 * Shape("", 64, 2, 128, 1, 1, 4096).kv_bytes, "a group of 32 is read in four parts"


def test_a_prediction_scales_with_the_work() -> None:
    double = Shape("llama-3-8b", 32, 8, 128, 32, 16, 16_384)
    one, two = (predict_decode(shape, GPUS["h200"]) for shape in (EIGHT_B, double))
    assert 1.9 < two.seconds / one.seconds < 2.1
    assert 1.9 < two.arithmetic_s / one.arithmetic_s < 2.1
    geometry = EIGHT_B.geometry(32)
    assert predict_copy(geometry, 10, GPUS["h200"]).moved_bytes == 20 * geometry.block_bytes
    assert splits_of(EIGHT_B, GPUS["h100"]).count == 3


def test_the_layers_measured_outgrow_the_cache() -> None:
    small = Shape("llama-3-8b", 32, 8, 128, 32, 1, 1024)
    assert layers_past_cache(small, GPUS["h100"]) == 32
    assert layers_past_cache(EIGHT_B, GPUS["h100"]) == 1
