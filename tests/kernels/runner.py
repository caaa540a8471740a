"""Runs the kernels' checks on a built library and says, as an exit status, whether they passed: for processes of their own.

    python -m tests.kernels.runner LIBRARY --seeds 3 decode:bfloat16:128:4 copy write

The sanitized library needs a process that AddressSanitizer was loaded into first; a planted fault may well crash its process.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvstore.errors import KVStoreError
from kvstore.kernels.backend import Backend
from kvstore.kernels.host import HostBackend
from kvstore.kernels.variants import VECTORS, Variant, copy_variant, decode_variant, reduce_variant, write_variant
from tests.kernels.cases import check_decode, decode_case
from tests.kernels.copy_cases import AXES, check_copy, check_copy_of_pieces, check_copy_of_slots, copy_case
from tests.kernels.far_cases import check_far
from tests.kernels.write_cases import check_write


def run_suite(backend: Backend, suite: str, seed: int) -> None:
    """One suite with one seed: "decode:DTYPE:DIM:GROUP", "copy", "write" or "far". Raises AssertionError or KVStoreError."""
    kind, *words = suite.split(":")
    if kind == "decode":
        check_decode(backend, decode_case(seed, words[0], int(words[1]), int(words[2])))
    elif kind == "copy":
        for axes in AXES:
            for to_slots in (True, False):
                check_copy(backend, copy_case(seed, axes), to_slots=to_slots)
        for first_tokens in (True, False):
            check_copy_of_slots(backend, seed, first_tokens=first_tokens)
        check_copy_of_pieces(backend, seed)
    elif kind == "far":
        check_far(backend)
    else:
        check_write(backend, seed)


def variants_of(suite: str) -> list[Variant]:
    """The kernels that a suite needs."""
    kind, *words = suite.split(":")
    if kind == "decode":
        dtype, dim, group = words[0], int(words[1]), int(words[2])
        return [decode_variant(dtype, dim, group), reduce_variant(dtype, dim)]
    if kind == "far":
        return [decode_variant("float32", 64, 1), copy_variant(16), write_variant(16)]
    return [(copy_variant if kind == "copy" else write_variant)(size) for size in VECTORS]


def main() -> int:
    """Run them; 0 if all passed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("library", type=Path)
    parser.add_argument("suites", nargs="+")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    backend = HostBackend(args.library)
    count = 0
    for suite in args.suites:
        for seed in range(args.seeds):
            backend.reorder(seed)
            try:
                run_suite(backend, suite, seed)
            except (AssertionError, KVStoreError) as error:
                print(f"{suite}, seed {seed}: {error}")
                return 1
            count += 1
    print(f"{count} passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
