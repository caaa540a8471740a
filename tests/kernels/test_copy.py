"""Copies between an engine's layouts and slots, copies of slots, and writes of new tokens: every byte, inside and outside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.errors import GeometryError, InvalidArgument
from kvstore.geometry import Geometry, Quant
from kvstore.kernels.copying import copy_blocks, copy_pieces, copy_slots, engine_tensors
from kvstore.kernels.host import HostBackend
from kvstore.kernels.layout import SlotSpace, table_entries
from kvstore.kernels.variants import Variant
from kvstore.kernels.writing import write_kv
from tests.kernels.copy_cases import AXES, check_copy, check_copy_of_pieces, check_copy_of_slots, copy_case
from tests.kernels.write_cases import check_write

SEEDS = range(12)
NONE = np.zeros(0, np.uint32)


@pytest.mark.parametrize("axes", AXES)
def test_blocks_are_gathered_from_an_engines_layout_and_scattered_back(backend: HostBackend, axes: str) -> None:
    for seed in SEEDS:
        check_copy(backend, copy_case(seed, axes), to_slots=True)
        check_copy(backend, copy_case(seed, axes), to_slots=False)


@pytest.mark.parametrize("first_tokens", [False, True])
def test_slots_are_copied_to_slots(backend: HostBackend, first_tokens: bool) -> None:
    for seed in SEEDS:
        check_copy_of_slots(backend, seed, first_tokens=first_tokens)


def test_pieces_of_blocks_are_copied_from_arena_to_arena(backend: HostBackend) -> None:
    for seed in range(30):
        check_copy_of_pieces(backend, seed)


def test_a_layer_of_many_blocks_is_one_launch_of_wide_copies(backend: HostBackend, launched: list[str]) -> None:
    slots = SlotSpace(Geometry("mha", 4, 2, 64, 64, "bfloat16", 16), tuple(_arena().ctypes.data for _ in range(2)))
    copy_pieces(backend, slots, (8192, 8192), table_entries(np.arange(0, 32, 8), arena=1), table_entries(np.arange(0, 32, 8)))
    assert launched == ["copy_16"]


@pytest.mark.parametrize("piece", [(-16, 32), (0, 0), (496, 32), (512, 16), (0, 513)])
def test_bytes_outside_of_a_block_are_refused(backend: HostBackend, piece: tuple[int, int]) -> None:
    with pytest.raises(InvalidArgument, match="of a block of 512"):
        copy_pieces(backend, _slots(), piece, NONE, NONE)
    with pytest.raises(InvalidArgument, match="begin it at a multiple of 16"):
        copy_pieces(backend, _slots(), (8, 16), NONE, NONE)


def test_new_tokens_of_a_ragged_step_reach_their_slots(backend: HostBackend) -> None:
    for seed in range(60):
        check_write(backend, seed)


@pytest.fixture
def launched(backend: HostBackend, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that run, by name."""
    names: list[str] = []
    launch = backend.launch

    def record(variant: Variant, *rest: Any) -> None:
        names.append(variant.name)
        launch(variant, *rest)

    monkeypatch.setattr(backend, "launch", record)
    return names


def test_a_block_copy_is_one_launch_for_all_layers_and_blocks(backend: HostBackend, launched: list[str]) -> None:
    case = next(case for case in (copy_case(seed, "kbthd") for seed in SEEDS) if len(case.wholes) > 1 and len(case.numbers) > 1)
    check_copy(backend, case, to_slots=True)
    assert len(launched) == 1


_ARENAS: list[np.ndarray[Any, np.dtype[np.uint8]]] = []  # kept alive


def _arena() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Memory that begins on 16 bytes, with room for a few slots."""
    whole = np.zeros((1 << 18) + 15, np.uint8)
    _ARENAS.append(whole[-whole.ctypes.data % 16 :])
    return _ARENAS[-1]


def _slots(**changed: Any) -> SlotSpace:
    facts: dict[str, Any] = {"kind": "mha", "layers": 1, "kv_heads": 2, "key_dim": 8, "value_dim": 8, "dtype": "float32", "block_tokens": 4}
    return SlotSpace(Geometry(**(facts | changed)), (1 << 20,))


@pytest.mark.parametrize(
    ("layers", "axes", "message"),
    [
        ([np.zeros((2, 3, 4, 2, 8), np.float32)], "kbdht", "d as the last"),
        ([np.zeros((2, 3, 4, 2, 8), np.float32)], "kbthx", "are not understood"),
        ([np.zeros((2, 3, 4, 2, 8), np.float32)], "bthd", "has not the axes"),
        ([np.zeros((3, 3, 4, 2, 8), np.float32)], "kbthd", "keys and values are 2"),
        ([np.zeros((2, 3, 4, 2, 8), np.float32), np.zeros((2, 4, 4, 2, 8), np.float32)], "kbthd", "layer 1 has other shapes"),
        ([(np.zeros((3, 4, 2, 8), np.float32), np.zeros((3, 4, 2, 4), np.float32))], "bthd", "keys and values differ"),
        ([np.zeros((2, 3, 4, 2, 16), np.float32)[..., ::2]], "kbthd", "must be contiguous"),
        ([np.zeros((2, 3, 4, 2, 8), np.complex64)], "kbthd", "unknown to the kernels"),
        ([], "kbthd", "no layers"),
    ],
)
def test_tensors_that_are_no_engines_layout_are_refused(backend: HostBackend, layers: list[Any], axes: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        engine_tensors(backend, layers, axes)


def test_blocks_of_another_shape_are_not_copied(backend: HostBackend) -> None:
    engine = engine_tensors(backend, [np.zeros((2, 3, 4, 2, 8), np.float32)], "kbthd")
    copy_blocks(backend, engine, _slots(), NONE, NONE)
    for changed in ({"layers": 2}, {"kv_heads": 1}, {"dtype": "float16"}, {"block_tokens": 8}, {"key_dim": 4, "value_dim": 4}):
        with pytest.raises(GeometryError, match="cannot be copied"):
            copy_blocks(backend, engine, _slots(**changed), NONE, NONE)
    for slots in (_slots(quant=Quant("symmetric", "head")), _slots(value_dim=4)):
        with pytest.raises(GeometryError, match=r"slot to slot|rows of one size"):
            copy_blocks(backend, engine, slots, NONE, NONE)


def test_block_numbers_that_do_not_pair_are_refused(backend: HostBackend) -> None:
    engine = engine_tensors(backend, [np.zeros((2, 3, 4, 2, 8), np.float32)], "kbthd")
    with pytest.raises(InvalidArgument, match="target_blocks is uint32"):
        copy_blocks(backend, engine, _slots(), np.zeros(2, np.uint32), np.zeros(1, np.uint32))
    with pytest.raises(InvalidArgument, match="the first 5 tokens"):
        copy_slots(backend, _slots(), NONE, NONE, tokens=5)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"layer": 1}, InvalidArgument, "layer 1 of 1"),
        ({"keys": np.zeros((3, 2, 4), np.float32)}, InvalidArgument, "keys is float32"),
        ({"values": np.zeros((2, 2, 8), np.float32)}, InvalidArgument, "values is float32"),
        ({"keys": np.zeros((3, 2, 8), np.float16)}, InvalidArgument, "cannot be read as float32"),
        ({"starts": np.zeros(2, np.int32)}, InvalidArgument, r"give int32 \[3\]"),
        ({"slots": _slots(quant=Quant("symmetric", "head"))}, GeometryError, "without scales"),
    ],
)
def test_a_wrong_argument_of_a_write_is_named(backend: HostBackend, changed: dict[str, Any], error: type[Exception], message: str) -> None:
    words: dict[str, Any] = {
        "keys": np.zeros((3, 2, 8), np.float32), "values": np.zeros((3, 2, 8), np.float32), "slots": _slots(), "layer": 0,
        "table": np.zeros((2, 1), np.uint32), "starts": np.zeros(3, np.int32), "context": np.zeros(2, np.int32),
    }  # fmt: skip
    with pytest.raises(error, match=message):
        write_kv(backend, **(words | changed))
