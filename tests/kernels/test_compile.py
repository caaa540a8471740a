"""The kernels as NVRTC and nvcc compile them for three generations of GPUs: no spills, few registers, loads of 128 bits.

Needs what the extra `compile` brings; no GPU. With KVSTORE_ALL_KERNELS=1 in the environment all kernels are compiled, in a minute.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.kernels.cuda import Compiled, compile_for
from kvstore.kernels.variants import (
    ELEMENTS,
    FOLDER,
    GROUPS,
    HEAD_DIMS,
    Variant,
    all_variants,
    copy_variant,
    decode_variant,
    reduce_variant,
    source_text,
    write_variant,
)

CAPABILITIES = (80, 90, 100)
REGISTERS_PER_MULTIPROCESSOR = 65_536  # of all three
# Always compiled: what Llama-3-8B and 70B decode with.
LLAMA = [decode_variant("bfloat16", 128, 4), decode_variant("bfloat16", 128, 8), reduce_variant("bfloat16", 128)]
HOT = [*LLAMA, copy_variant(16), write_variant(16)]
NVIDIA = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13"
INSTALL = "pip install -e '.[compile]'"


def _some(capability: int) -> list[Variant]:
    """The hot kernels, and for each capability another third of the dtypes and head dims, each with two groups. Or all, if asked."""
    if os.environ.get("KVSTORE_ALL_KERNELS"):
        return sorted(all_variants())
    turn = CAPABILITIES.index(capability)
    pairs = [(dtype, dim) for dtype in ELEMENTS for dim in HEAD_DIMS][turn::3]
    groups = [(GROUPS[place % 2], GROUPS[2 + place % 2]) for place in range(len(pairs))]
    decodes = [decode_variant(*pair, group) for pair, two in zip(pairs, groups, strict=True) for group in two]
    return sorted({*HOT, *decodes, *(reduce_variant(*pair) for pair in pairs)})


@pytest.fixture(scope="session")
def programs() -> dict[int, Compiled]:
    """By capability; skips without NVRTC."""
    try:
        return {capability: compile_for(_some(capability), capability) for capability in CAPABILITIES}
    except ConfigError as error:
        pytest.skip(f"{error}; or {INSTALL}")


def _usage(log: str) -> dict[str, tuple[int, int]]:
    """Registers, and bytes of spills and stack, of each kernel in what ptxas printed."""
    found = {}
    for part in log.split("Compiling entry function '")[1:]:
        registers = int(re.search(r"Used (\d+) registers", part)[1])  # type: ignore[index]
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        found[part.split("'")[0]] = (registers, sum(map(int, frame.groups())) if frame else -1)
    return found


def _check_usage(variants: Sequence[Variant], log: str) -> None:
    usage = _usage(log)
    assert set(usage) == {variant.name for variant in variants}
    assert {name: spilled for name, (_, spilled) in usage.items() if spilled} == {}
    for variant in variants:
        blocks = variant.resident or 2048 // variant.threads // 2  # the others: half of all threads that a multiprocessor holds
        assert usage[variant.name][0] * variant.threads * blocks <= REGISTERS_PER_MULTIPROCESSOR, variant.name


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_nvrtc_compiles_without_spills_and_within_the_registers(programs: dict[int, Compiled], capability: int) -> None:
    _check_usage(_some(capability), programs[capability].log)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_nvcc_compiles_without_spills_and_within_the_registers(capability: int, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc", path=f"{NVIDIA / 'bin'}") or shutil.which("nvcc")
    if nvcc is None or shutil.which("g++") is None:
        pytest.skip(f"nvcc, or the g++ that it needs, is not installed: {INSTALL}")
    source = tmp_path / "kvstore.cu"
    source.write_text(source_text(HOT), encoding="utf-8")
    words = [nvcc, "-std=c++17", "-O3", f"-arch=sm_{capability}", "-cubin", "-Xptxas", "-v", "-Werror", "all-warnings", "-I", str(FOLDER)]
    words += [str(source), "-o", str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    _check_usage(HOT, done.stderr)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_keys_and_values_are_loaded_128_bits_at_a_time(programs: dict[int, Compiled], capability: int, tmp_path: Path) -> None:
    nvdisasm = shutil.which("nvdisasm", path=f"{NVIDIA / 'bin'}") or shutil.which("nvdisasm")
    if nvdisasm is None:
        pytest.skip(f"nvdisasm is not installed: {INSTALL}")
    cubin = tmp_path / "kvstore.cubin"
    cubin.write_bytes(programs[capability].cubin)
    done = subprocess.run([nvdisasm, "-c", str(cubin)], capture_output=True, text=True, timeout=100, check=True)
    texts = dict(zip(*[iter(re.split(r"\n\.text\.(\w+):", done.stdout)[1:])] * 2, strict=True))
    for variant in _some(capability):
        loads = re.findall(r"\bLDG\.[\w.]*", texts[variant.name])
        wide = [load for load in loads if ".128" in load]
        if variant.kernel == "paged_decode":
            _, _, group = variant.parameters.split(", ")
            rounds = sum(".NA" in load or ".CONSTANT" in load for load in wide)
            assert rounds >= 4, f"{variant.name}: {loads}"
            assert len(wide) >= rounds + int(group), "the queries"
        elif variant.kernel in ("block_copy", "kv_write"):
            assert wide, variant.name
            assert re.search(r"\bSTG\.[\w.]*128", texts[variant.name]), variant.name
