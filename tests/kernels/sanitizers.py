"""Loading AddressSanitizer into a process before Python."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest


def environment(compiler: str) -> dict[str, str]:
    """The environment of a process that loads libraries sanitized by `compiler`; skips the test where it has no runtime to load."""
    name = "libclang_rt.asan-x86_64.so" if "clang" in Path(compiler).resolve().name else "libasan.so"
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip(f"{compiler} has no {name} to load; install it to run the kernels under the sanitizers")
    return os.environ | {"LD_PRELOAD": found, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}
