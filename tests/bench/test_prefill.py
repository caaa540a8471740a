"""The benchmark of prompts on the CPU compares two that give the same, and says so where the kernel serves no such heads."""

from __future__ import annotations

import pytest

from kvstore.bench.prefill import measure
from kvstore.errors import ConfigError
from kvstore.kernels.cpu import available, instruction_sets
from kvstore.kernels.cpu.library import find


def test_both_are_timed_and_give_the_same() -> None:
    library, _ = find()
    if library is None or "avx512_bf16" not in instruction_sets(library):
        pytest.skip(available() or "this processor has no products of bfloat16")
    found = measure(40, 30, (4, 2, 64), 2, 2)
    assert sorted(found) == ["kernel", "torch"]
    assert all(seconds > 0 for seconds in found.values())
    with pytest.raises(ConfigError, match="torch's attention"):
        measure(8, 0, (2, 1, 24), 1, 1)
