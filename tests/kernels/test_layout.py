"""The numbers that the kernels are given: divisors, table entries, and structures that C++ and Python lay out alike."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.errors import GeometryError, InternalFault, InvalidArgument
from kvstore.geometry import Geometry
from kvstore.kernels.arrays import describe, require_place
from kvstore.kernels.host import HostBackend
from kvstore.kernels.layout import ARENA_SHIFT, ARENAS, CopyArgs, DecodeArgs, SlotSpace, WriteArgs, divisor, table_entries
from kvstore.kernels.variants import GROUPS, HEAD_DIMS, all_variants, copy_variant, decode_variant

LARGEST = 2**31 - 1


def test_division_by_multiplication_is_exact() -> None:
    rng = np.random.default_rng(0)
    for number in [*range(1, 70), 127, 128, 255, 1000, 12_345, 2**16 - 1, 2**16, 2**30, 2**30 + 1, LARGEST - 1, LARGEST]:
        n = np.concatenate([rng.integers(0, LARGEST + 1, 500), [0, 1, LARGEST], np.arange(number * 3 - 2, number * 3 + 2) % (LARGEST + 1)])
        by = divisor(number)
        found = ((n.astype(np.uint64) * np.uint64(by.magic) >> np.uint64(32)) + n.astype(np.uint64)) >> np.uint64(by.shift)
        assert (found == n // number).all(), number
        assert ((n.astype(np.uint64) * np.uint64(by.magic) >> np.uint64(32)) + n.astype(np.uint64) < 2**32).all(), "more than 32 bits"


@pytest.mark.parametrize("number", [0, -1, LARGEST + 1])
def test_a_divisor_outside_32_bits_is_refused(number: int) -> None:
    with pytest.raises(InvalidArgument, match="cannot divide"):
        divisor(number)


def test_an_entry_names_its_arena_and_slot() -> None:
    assert table_entries([0, 5], 0).tolist() == [0, 5]
    assert table_entries(np.array([7], np.uint32), 3).tolist() == [3 << ARENA_SHIFT | 7]
    for units, arena in (([2**ARENA_SHIFT], 0), ([-1], 0), ([0], ARENAS), ([0], -1)):
        with pytest.raises(InvalidArgument):
            table_entries(units, arena)


def test_structures_have_the_compilers_sizes(built: Callable[..., Path]) -> None:
    library = ctypes.CDLL(str(built(all_variants())))
    for kind in (DecodeArgs, CopyArgs, WriteArgs):
        assert getattr(library, f"kv_bytes_{kind.__name__}")() == ctypes.sizeof(kind)


def test_arguments_of_another_size_are_not_launched(backend: HostBackend) -> None:
    with pytest.raises(InternalFault, match="bytes in C"):
        backend.launch(copy_variant(16), (1, 1, 1), 0, WriteArgs())


def test_arenas_are_counted_and_aligned() -> None:
    geometry = Geometry("mha", 1, 1, 64, 64, "float32", 16)
    for arenas in ((), (16,) * (ARENAS + 1), (17,), (0,)):
        with pytest.raises(InvalidArgument, match="arena"):
            SlotSpace(geometry, arenas)


def test_opaque_pages_divide_over_the_layers() -> None:
    geometry = Geometry("mha", 3, 1, 64, 64, "uint8", 16, format="engine", opaque_block_bytes=100)
    with pytest.raises(GeometryError, match="no whole number"):
        SlotSpace(geometry, (16,)).nest()


def test_every_group_has_a_kernel_that_holds_it_or_a_part() -> None:
    for dim in HEAD_DIMS:
        names = [decode_variant("bfloat16", dim, group).name for group in (1, 2, 3, 5, 8, 71)]
        assert names == [f"decode_bf16_d{dim}_g{size}" for size in (1, 2, 4, 8, 8, 8)]
    assert GROUPS[-1] == 8


class OnDevice:
    """What CuPy's arrays offer."""

    def __init__(self, **changed: Any) -> None:
        self.__cuda_array_interface__ = {"data": (4096, False), "shape": (2, 3), "typestr": "<f2", "version": 3} | changed


def test_arrays_of_any_maker_are_described() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros((2, 3, 4), dtype=torch.bfloat16)[:, 1:, :]
    found = describe(tensor)
    assert (found.address, found.shape, found.strides_bytes) == (tensor.data_ptr(), (2, 2, 4), (24, 8, 2))
    assert (found.dtype, found.on_device) == ("bfloat16", False)
    device = describe(OnDevice())
    assert (device.address, device.strides_bytes, device.dtype, device.on_device) == (4096, (6, 2), "float16", True)
    assert describe(np.zeros(3, np.uint16), "bfloat16").dtype == "bfloat16"


def test_an_array_in_the_wrong_memory_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="lies in a GPU's memory, the kernels run on this process's memory"):
        require_place(False, [describe(OnDevice())])
    with pytest.raises(InvalidArgument, match="lies in this process's memory, the kernels run on a GPU's memory"):
        require_place(True, [describe(np.zeros(3, np.float32))])


def test_an_array_with_its_bytes_swapped_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=">f4"):
        describe(np.zeros(3, ">f4"))
