"""Builds the CPU kernels with other flags or from other sources, and checks such a library in a process of its own.

    python -m tests.kernels.cpu_runner LIBRARY --examples 20 --isa plain --isa avx2

The sanitized library needs a process that AddressSanitizer was loaded into first; a planted fault may well crash its process.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from kvstore.kernels.cpu.library import instruction_sets, load
from tests.kernels.cpu_cases import Case, cases, check_decode, check_prompt, check_write

SOURCES = Path(__file__).resolve().parent.parent.parent / "kernels" / "cpu"
FLAGS = ("-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fPIC", "-pthread")
BUILD_S = 100.0  # seconds for one compilation: ten times what the slowest takes


def build(target: Path, flags: Sequence[str], sources: Path = SOURCES) -> Path:
    """Compile the library with these flags, file by file on two cores. Skips the test where there is no C compiler."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    objects = {path: target.with_name(f"{target.stem}-{path.stem}.o") for path in sorted(sources.glob("*.c"))}
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda pair: _run("cc", *FLAGS, *flags, "-c", str(pair[0]), "-o", str(pair[1])), objects.items()))
    _run("cc", *FLAGS, *flags, "-shared", *map(str, objects.values()), "-o", str(target), "-lm")
    return target


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=BUILD_S, check=False)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stderr[-4000:]}"


def main() -> int:
    """Check so many drawn cases with each instruction set; 0 if all passed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("library", type=Path)
    parser.add_argument("--examples", type=int, default=20)
    parser.add_argument("--isa", action="append")
    args = parser.parse_args()
    library = load(args.library)
    isas = args.isa or instruction_sets(library)

    unhurried = settings(max_examples=args.examples, deadline=None, suppress_health_check=list(HealthCheck))

    @settings(unhurried, database=None, derandomize=True, phases=[Phase.generate])
    @given(cases())
    def check(case: Case) -> None:
        check_write(case, library)
        check_prompt(case, library)
        for isa in isas:
            check_decode(case, isa, library)

    try:
        check()
    except AssertionError as error:
        print(str(error)[:2000])
        return 1
    print(f"{args.examples} passed with {', '.join(isas)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
