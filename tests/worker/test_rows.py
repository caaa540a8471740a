"""Blocks are found, gathered and written where kv1 says, whatever the sizes."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from kvstore.errors import GeometryError
from kvstore.geometry import Geometry, Quant
from kvstore.worker.joint import JointWriter, alike
from kvstore.worker.rows import ArenaRows, BlockTable, Gatherer, RowLayout, Scratch

GEOMETRIES = [
    Geometry.mla(layers=2, latent_dim=40, rope_dim=8, dtype="bfloat16", block_tokens=16),
    Geometry("gqa", 30, 3, 64, 64, "bfloat16", 16),
    Geometry("mqa", 2, 1, 128, 128, "float16", 32),
    Geometry("mha", 3, 5, 40, 24, "float32", 7),
    Geometry("gqa", 2, 2, 192, 128, "bfloat16", 16),
    Geometry("mha", 1, 1, 1, 1, "float32", 1),
]


def scattered(geometry: Geometry, blocks: int, arenas: int = 1, seed: int = 0) -> BlockTable:
    """A table over slots in random order, its blocks dealt to so many arenas in turn, runs of two."""
    layout = RowLayout(geometry)
    table = BlockTable(layout)
    order = np.random.default_rng(seed).permutation(2 * blocks) * geometry.slot_units
    made = [ArenaRows(layout, np.zeros(2 * blocks * geometry.slot_bytes, np.uint8)) for _ in range(arenas)]
    for index in range(0, blocks, 2):
        table.append(made[index // 2 % arenas], order[index : min(index + 2, blocks)].tolist())
    return table


def random_kv(geometry: Geometry, tokens: int) -> tuple[Tensor, Tensor]:
    dtype = getattr(torch, geometry.dtype)
    layout = RowLayout(geometry)
    dims = layout.key_dim, layout.value_dim
    return torch.randn(layout.heads, tokens, dims[0]).to(dtype), torch.randn(layout.heads, tokens, dims[1]).to(dtype)


@pytest.mark.parametrize("arenas", [1, 2])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("cuts", [[], [1], [3, 4], [16, 32], [5, 21, 22]])
def test_what_is_written_in_pieces_is_gathered_whole(geometry: Geometry, cuts: list[int], arenas: int) -> None:
    blocks = 7
    tokens = blocks * geometry.block_tokens
    table = scattered(geometry, blocks, arenas)
    written = [random_kv(geometry, tokens) for _ in range(geometry.layers)]
    edges = [0, *[cut for cut in cuts if cut < tokens], tokens]
    for layer, (keys, values) in enumerate(written):
        for low, high in pairwise(edges):
            table.write(layer, low, keys[:, low:high], values[:, low:high])
    gatherer, scratch = Gatherer(table, 0, blocks), Scratch(table.layout)
    for layer, (keys, values) in enumerate(written):
        found_keys, found_values = gatherer.layer(layer, scratch)
        assert torch.equal(found_keys, keys)
        assert torch.equal(found_values, values)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_a_block_lies_as_its_geometry_says(geometry: Geometry) -> None:
    table = scattered(geometry, 3)
    written = [random_kv(geometry, 3 * geometry.block_tokens) for _ in range(geometry.layers)]
    for layer, (keys, values) in enumerate(written):
        table.write(layer, 0, keys, values)
    arena, units = table.runs[0].arena, table.runs[0].units
    for block, unit in enumerate(units):
        tokens = slice(block * geometry.block_tokens, (block + 1) * geometry.block_tokens)
        for layer, views in enumerate(geometry.tensor_views()):
            names = ("kv",) if geometry.kind == "mla" else ("k", "v")
            for name, whole in zip(names, written[layer], strict=False):
                part = whole[0] if geometry.kind == "mla" else whole
                width = part.element_size()
                start = (unit * 4096 + views[name].offset_bytes) // width
                strides = [stride // width for stride in views[name].strides_bytes]
                assert torch.equal(arena.items.as_strided(views[name].shape, strides, start), part[..., tokens, :])


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_tokens_of_many_sequences_are_written_as_one_by_one(geometry: Geometry) -> None:
    layout = RowLayout(geometry)
    blocks, room = 3, 4 * geometry.slot_bytes * 3
    arenas = [ArenaRows(layout, np.zeros(room, np.uint8)) for _ in range(2)]
    tables = [[BlockTable(layout) for _ in range(4)] for _ in arenas]
    positions = [0, 2 * geometry.block_tokens, geometry.block_tokens - 1, 3 * geometry.block_tokens - 1]
    for arena, some in zip(arenas, tables, strict=True):
        for index, table in enumerate(some):
            table.append(arena, [(block * 4 + index) * geometry.slot_units for block in range(blocks)])
    places = list(zip(tables[1], positions, strict=True))
    assert alike(places) is arenas[1]
    assert alike([*places, (tables[0][0], 0)]) is None
    together = JointWriter(layout, arenas[1], places)
    for layer in range(geometry.layers):
        keys, values = random_kv(geometry, 4)
        together.write(layer, keys, values)
        for at, (table, position) in enumerate(zip(tables[0], positions, strict=True)):
            table.write(layer, position, keys[:, at : at + 1], values[:, at : at + 1])
    assert torch.equal(*(arena.items.view(torch.uint8) for arena in arenas))
    assert arenas[0].items.count_nonzero() > 0


def test_a_table_s_slots_follow_its_blocks() -> None:
    geometry = GEOMETRIES[2]
    table = scattered(geometry, 150, arenas=2)
    other = table.copy()
    other.pop()
    other.append(table.runs[0].arena, [0])
    assert table.slots.tolist() == [address + unit * 4096 for address, unit in table.addresses()]
    assert other.slots.tolist() == [address + unit * 4096 for address, unit in other.addresses()]
    assert other.slots.tolist() != table.slots.tolist()


def test_keys_of_another_shape_are_refused() -> None:
    geometry = GEOMETRIES[1]
    table = scattered(geometry, 2)
    keys, values = random_kv(geometry, 2)
    for wrong in ((keys.repeat(2, 1, 1), values.repeat(2, 1, 1)), (keys[..., 1:], values), (keys, values[..., 1:])):
        with pytest.raises(GeometryError, match="do not fit"):
            table.write(0, 0, *wrong)


def test_a_write_touches_no_other_block() -> None:
    geometry = GEOMETRIES[1]
    table = scattered(geometry, 4)
    arena, units = table.runs[0].arena, table.runs[0].units
    before = arena.items.clone()
    table.write(5, geometry.block_tokens + 3, *random_kv(geometry, 20))
    changed = torch.nonzero(arena.items.view(torch.int16) != before.view(torch.int16)).flatten() * 2 // geometry.slot_bytes
    assert set(changed.tolist()) <= {unit // geometry.slot_units for unit in units[1:3]}


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry("mha", 1, 1, 8, 8, "int8", 16, quant=Quant("symmetric", "head")),
        Geometry("mha", 1, 1, 8, 8, "bfloat16", 16, format="theirs", opaque_block_bytes=4096),
    ],
    ids=["quantised", "opaque"],
)
def test_a_layout_that_it_cannot_read_is_refused(geometry: Geometry) -> None:
    with pytest.raises(GeometryError):
        RowLayout(geometry)
