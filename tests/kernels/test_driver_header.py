"""The driver's functions, structures and constants, as kernels/driver.py has them, against NVIDIA's own header."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.kernels import driver
from kvstore.kernels.driver import AccessDescription, AllocationProperties, IpcHandle, LibCuda
from kvstore.kernels.variants import FOLDER
from kvstore.testing import fake_cuda, fake_cuda_parts
from tests.kernels.test_compile import INSTALL, NVIDIA

STRUCTURES = {
    "CUmemAllocationProp": (AllocationProperties, {"type": "type", "handle_types": "requestedHandleTypes", "location": "location",
                                                   "windows": "win32HandleMetaData", "flags": "allocFlags"}),
    "CUmemAccessDesc": (AccessDescription, {"location": "location", "flags": "flags"}),
    "CUipcMemHandle": (IpcHandle, {"reserved": "reserved"}),
}  # fmt: skip
CONSTANTS = {
    "CU_IPC_HANDLE_SIZE": driver.IPC_HANDLE_BYTES,
    "CUDA_ERROR_OUT_OF_MEMORY": driver.OUT_OF_MEMORY,
    "CUDA_ERROR_NOT_READY": driver._NOT_READY,
    "CUDA_ERROR_INVALID_VALUE": fake_cuda_parts.INVALID,
    "CUDA_ERROR_LAUNCH_FAILED": fake_cuda.LOST,
    "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED": fake_cuda.ALREADY_PINNED,
    "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": driver._MULTIPROCESS_DESCRIPTORS[0],
    "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": driver._MULTIPROCESS_DESCRIPTORS[1],
    "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR": driver._DESCRIPTOR,
    "CU_MEM_ACCESS_FLAGS_PROT_READWRITE": driver._READ_WRITE,
    "CU_STREAM_NON_BLOCKING": driver._NON_BLOCKING,
    "(CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING)": driver._SLEEP_UNTIMED,
    "CU_MEMHOSTREGISTER_PORTABLE": driver._PORTABLE,
    "CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS": driver._LAZY_PEERS,
    "CU_MEM_ALLOCATION_TYPE_PINNED": 1,
    "CU_MEM_LOCATION_TYPE_DEVICE": 1,
    "CU_MEM_ALLOC_GRANULARITY_RECOMMENDED": 1,
    "sizeof(CUdeviceptr)": 8,
    "sizeof(CUmemGenericAllocationHandle)": 8,
    "sizeof(CUuuid)": 16,
}


def _checks() -> Iterator[str]:
    """A line of C for each thing that must be so."""
    for name in re.findall(r'"(cu[A-Z]\w+)"', (FOLDER / "driver.py").read_text(encoding="utf-8")):
        yield f"void *has_{name}(void) {{ return (void *)&{name}; }}"
    for name in set(re.findall(r"_library\.(cu[A-Z]\w+)\(", (FOLDER / "driver.py").read_text(encoding="utf-8"))):
        yield f"void *calls_{name}(void) {{ return (void *)&{name}; }}"
    for what, value in CONSTANTS.items():
        yield f'_Static_assert({what} == {value}, "{what}");'
    for name, (structure, fields) in STRUCTURES.items():
        yield f'_Static_assert(sizeof({name}) == {ctypes.sizeof(structure)}, "{name}");'
        for ours, theirs in fields.items():
            yield f'_Static_assert(offsetof({name}, {theirs}) == {getattr(structure, ours).offset}, "{name}.{theirs}");'


def test_names_structures_and_constants_are_those_of_the_header(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    folder = next((path for path in (NVIDIA / "include", Path("/usr/local/cuda/include")) if (path / "cuda.h").exists()), None)
    if compiler is None or folder is None:
        pytest.skip(f"a C compiler and cuda.h are needed: {INSTALL}")
    source = tmp_path / "check.c"
    lines = list(dict.fromkeys(_checks()))
    assert sum("has_cu" in line for line in lines) > 25
    source.write_text("#include <stddef.h>\n#include <cuda.h>\n" + "\n".join(lines) + "\n", encoding="utf-8")
    words = [compiler, "-std=c11", "-fsyntax-only", "-Werror", "-Wimplicit", "-I", str(folder), str(source)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_machine_without_a_driver_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ctypes.CDLL:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(ConfigError, match=r"no NVIDIA driver \(libcuda.so.1: cannot open shared object file\); install it"):
        LibCuda()
