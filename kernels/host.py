"""Compiles the kernels' own source for a CPU with `host_shim.h`, and launches them there: for tests, not for speed.

A library is built once for the same sources, flags and compiler, and kept in a folder. One launch at a time in a process.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import ConfigError, InternalFault, InvalidArgument
from kvstore.kernels.variants import FOLDER, Variant, source_text

FLAGS = ("-std=c++17", "-fPIC", "-DKV_HOST_SHIM", "-Wall", "-Wno-unknown-pragmas", "-Werror", "-ffp-contract=off")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g1")
BUILD_S = 300.0  # seconds for one compilation: the sanitized build of all kernels takes a tenth of that
JOBS = 2  # compilations at once: what the smallest machine that tests this has cores for


def compiler() -> str:
    """The C++ compiler's path: $CXX, or what is called c++, g++ or clang++. Raises ConfigError where there is none."""
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise ConfigError("no C++ compiler was found; install g++ or clang++, or name one in CXX, to run the kernels on a CPU")


def build(variants: Sequence[Variant], folder: Path, flags: Sequence[str] = ("-O2",), sources: Path = FOLDER) -> Path:
    """Compile these kernels into a shared library in `folder`, unless it is there; returns its path.

    `sources` is where the .cu files are. Raises ConfigError without a compiler, InternalFault where a source does not compile.
    """
    command = [compiler(), *FLAGS, *flags]
    texts = {f"part{index}": _program(variants[index::JOBS]) for index in range(min(JOBS, len(variants)))}
    texts["shim"] = '#include "host_shim.cpp"\n'
    digest = hashlib.sha256(repr((command, _version(command[0]), texts)).encode())
    for path in sorted(sources.glob("*.c*")) + sorted(sources.glob("*.h")):
        digest.update(path.read_bytes())
    target = folder / f"kernels-{digest.hexdigest()[:16]}.so"
    if target.exists():
        return target
    work = folder / f"{target.stem}.{os.getpid()}"
    work.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (work / f"{name}.cpp").write_text(text, encoding="utf-8")
    with ThreadPoolExecutor(JOBS) as pool:
        inputs = {name: [*command, "-I", str(sources), "-c", str(work / f"{name}.cpp"), "-o", str(work / f"{name}.o")] for name in texts}
        for waiting in [pool.submit(_run, words) for words in inputs.values()]:
            waiting.result()
    _run([*command, "-shared", *(str(work / f"{name}.o") for name in texts), "-o", str(work / "out.so")])
    (work / "out.so").replace(target)
    shutil.rmtree(work)
    return target


class HostBackend:
    """Launches the kernels of a built library on arrays in this process's memory.

    `seed` draws the order in which a thread block's threads run. A launch raises InternalFault where threads diverge.
    `loaded_bytes` counts what the decode kernels have read of K and V.
    """

    on_device = False
    multiprocessors = 2  # few, so that small tests have sequences with one split and with several

    def __init__(self, library: Path, seed: int = 0) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.kv_last_error.restype = ctypes.c_char_p
        self._library.kv_loaded_bytes.restype = ctypes.c_uint64
        self.loaded_bytes = 0
        self.reorder(seed)

    def reorder(self, seed: int) -> None:
        """Draw another order of threads."""
        self._library.kv_set_seed(ctypes.c_uint64(seed))

    def launch(self, variant: Variant, grid: tuple[int, int, int], shared_bytes: int, args: ctypes.Structure) -> None:
        """Run one kernel to its end."""
        entry = getattr(self._library, f"kv_launch_{variant.name}", None)
        if entry is None:
            raise InvalidArgument(f"this library has no kernel {variant.name}; build it with that variant")
        size = getattr(self._library, f"kv_bytes_{variant.args}")()
        if size != ctypes.sizeof(args):
            raise InternalFault(f"{variant.args} has {size} bytes in C++ and {ctypes.sizeof(args)} in layout.py")
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        block = (ctypes.c_uint * 3)(variant.threads, 1, 1)
        if entry((ctypes.c_uint * 3)(*grid), block, ctypes.c_uint(shared_bytes), pointers):
            raise InternalFault(f"{variant.name}: {self._library.kv_last_error().decode()}")
        self.loaded_bytes += int(self._library.kv_loaded_bytes())

    def upload(self, array: NDArray[Any]) -> NDArray[Any]:
        """A copy of an array."""
        return array.copy()

    def scratch(self, count: int) -> NDArray[np.float32]:
        """Memory for `count` floats, filled with NaN so that none is read before it was written."""
        return np.full(count, np.nan, np.float32)


def _program(variants: Sequence[Variant]) -> str:
    """Entries, a launcher for each, and the size of each kind of arguments."""
    text = source_text(variants)
    text += "".join(f"KV_HOST_LAUNCHER({variant.name}, {variant.args})\n" for variant in sorted(set(variants)))
    kinds = sorted({variant.args for variant in variants})
    sizes = "".join(f'extern "C" __attribute__((weak)) unsigned kv_bytes_{kind}() {{ return sizeof({kind}); }}\n' for kind in kinds)
    return text + sizes


def _version(path: str) -> str:
    return subprocess.run([path, "--version"], capture_output=True, text=True, timeout=BUILD_S, check=False).stdout


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=False)
    if done.returncode:
        raise InternalFault(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
