"""Random copies between an engine's layouts and slots, and from slot to slot, with every byte that must come out.

As in cases.py, nothing here uses the kernels' own layout code, and a case is made from its seed alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.geometry import UNIT_BYTES, Geometry, Quant
from kvstore.kernels.backend import Backend
from kvstore.kernels.copying import copy_blocks, copy_pieces, copy_slots, engine_tensors
from tests.kernels.cases import BLOCK_TOKENS, Pool, back
from tests.kernels.elements import RAW, Raw

# Apart with NHD and HND, packed in four ways, latent attention, and bytes.
AXES = ("bthd", "bhtd", "kbthd", "bkthd", "bkhtd", "kbhtd", "bhtkd", "btd", "bd")
DTYPES = ("float16", "bfloat16", "float32")
PAIRED = ("bthd", "bhtd")


@dataclass
class CopyCase:
    """Blocks of an engine's tensors, and slots for them.

    wholes    [layer][part]: the memory that holds each layer's tensor, or its keys and its values
    sizes     of the axes; a tensor is the first so many places of its memory in each
    numbers   the engine's blocks; `places` their slots
    """

    pool: Pool
    axes: str
    wholes: list[list[Raw]]
    sizes: dict[str, int]
    numbers: list[int]
    places: list[tuple[int, int]]

    def view(self, whole: Any) -> Any:
        """The tensor in its memory."""
        return whole[tuple(slice(self.sizes[axis]) for axis in self.axes)]

    def parts(self, wholes: list[list[Raw]], layer: int, number: int) -> list[Raw]:
        """One layer of one block: views of its keys and its values, [head, token, dim], or of what there is in their place."""
        found = []
        for whole in wholes[layer]:
            for part in range(2) if "k" in self.axes else (0,):
                at = tuple(number if axis == "b" else part if axis == "k" else slice(None) for axis in self.axes)
                left = [axis for axis in self.axes if axis in "htd"]
                found.append(self.view(whole)[at].transpose([left.index(axis) for axis in "htd" if axis in left]))
        return found

    def slot_parts(self, arenas: list[NDArray[np.uint8]], layer: int, place: tuple[int, int]) -> list[Raw]:
        """The same of a slot: the parts of a layer, and the layers, follow each other."""
        like = self.parts(self.wholes, layer, 0)
        size = like[0].nbytes
        start = place[1] * UNIT_BYTES + layer * size * len(like)
        memory = arenas[place[0]]
        return [memory[start + part * size :][:size].view(each.dtype).reshape(each.shape) for part, each in enumerate(like)]


def copy_case(seed: int, axes: str) -> CopyCase:
    """Random heads, dims, dtypes, numbers of blocks and gaps between them."""
    rng = np.random.default_rng([seed, AXES.index(axes)])
    layers, heads, tokens = int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.choice(BLOCK_TOKENS))
    dim, dtype = int(rng.choice([1, 3, 8, 64, 80])), str(rng.choice(DTYPES))
    blocks, count = int(rng.integers(4, 9)), int(rng.integers(1, 5))
    sizes = {"k": 2, "b": blocks, "h": heads, "t": tokens, "d": dim}
    raw: Any = RAW[dtype]
    geometry = Geometry("mha", layers, heads, dim, dim, dtype, tokens)
    if axes == "btd":
        geometry = Geometry.mla(layers=layers, latent_dim=dim, rope_dim=4, dtype=dtype, block_tokens=tokens)
        sizes["d"] = dim + 4
    elif axes == "bd":
        sizes["d"], raw = int(rng.choice([160, 4096, 9000, int(rng.integers(1, 9000))])), np.uint8
        geometry = Geometry("mha", layers, heads, dim, dim, "uint8", tokens, format="engine", opaque_block_bytes=sizes["d"] * layers)
    gap = int(rng.integers(0, 3))
    shape = [sizes[axis] + (gap if axis == axes[1] else 0) for axis in axes]
    wholes = [[rng.integers(0, np.iinfo(raw).max, shape, raw) for _ in range(2 if axes in PAIRED else 1)] for _ in range(layers)]
    pool = Pool.make(rng, geometry, count + 2, int(rng.integers(1, 3)))
    for arena in pool.arenas:
        arena[:] = rng.integers(0, 256, len(arena))
    return CopyCase(pool, axes, wholes, sizes, rng.permutation(blocks)[:count].tolist(), [pool.take() for _ in range(count)])


def check_copy(backend: Backend, case: CopyCase, *, to_slots: bool) -> None:
    """Copy, and compare every byte of both sides with what numpy makes of it."""
    wanted_arenas = [arena.copy() for arena in case.pool.arenas]
    wanted_wholes = [[whole.copy() for whole in layer] for layer in case.wholes]
    for number, place in zip(case.numbers, case.places, strict=True):
        for layer in range(len(case.wholes)):
            pairs = zip(case.parts(wanted_wholes, layer, number), case.slot_parts(wanted_arenas, layer, place), strict=True)
            for tensor, slot in pairs:
                if to_slots:
                    slot[:] = tensor
                else:
                    tensor[:] = slot
    memory, slots = case.pool.upload(backend)
    wholes = [[backend.upload(whole) for whole in layer] for layer in case.wholes]
    views = [tuple(map(case.view, layer)) if case.axes in PAIRED else case.view(layer[0]) for layer in wholes]
    engine = engine_tensors(backend, views, case.axes)
    entries = backend.upload(np.array([case.pool.entry(place) for place in case.places], np.uint32))
    numbers = backend.upload(np.array(case.numbers, np.uint32))
    if to_slots:
        copy_blocks(backend, engine, slots, numbers, entries)
    else:
        copy_blocks(backend, slots, engine, entries, numbers)
    for want, found in zip(wanted_arenas, memory, strict=True):
        assert (want == back(found)).all(), "bytes in the slots differ"
    for wants, founds in zip(wanted_wholes, wholes, strict=True):
        for want, found in zip(wants, founds, strict=True):
            assert (want == back(found)).all(), "bytes in the engine's tensors differ"


def check_copy_of_slots(backend: Backend, seed: int, *, first_tokens: bool) -> None:
    """Copy slots to slots: whole blocks, with scales and of any format, or the first tokens of kv1 blocks."""
    rng = np.random.default_rng([seed, first_tokens])
    dtype, tokens, dim = str(rng.choice(DTYPES)), int(rng.choice(BLOCK_TOKENS)), int(rng.choice([3, 8, 64]))
    quant = None if first_tokens or rng.random() < 0.5 else Quant("symmetric", "token", "float32")
    geometry = Geometry("mha", int(rng.integers(1, 4)), int(rng.integers(1, 4)), dim, dim, dtype, tokens, quant=quant)
    count = int(rng.integers(1, 4))
    pool = Pool.make(rng, geometry, 2 * count, int(rng.integers(1, 3)))
    for arena in pool.arenas:
        arena[:] = rng.integers(0, 256, len(arena))
    sources, targets = [pool.take() for _ in range(count)], [pool.take() for _ in range(count)]
    kept = int(rng.integers(0, tokens + 1))
    wanted = [arena.copy() for arena in pool.arenas]
    other = Pool(geometry, wanted)
    for source, target in zip(sources, targets, strict=True):
        if first_tokens:
            other.tensors(target)[:, :, :, :kept] = pool.tensors(source)[:, :, :, :kept]
        else:
            size, at = geometry.block_bytes, target[1] * UNIT_BYTES
            wanted[target[0]][at : at + size] = pool.arenas[source[0]][source[1] * UNIT_BYTES :][:size]
    memory, slots = pool.upload(backend)
    of, to = (backend.upload(np.array([pool.entry(place) for place in places], np.uint32)) for places in (sources, targets))
    copy_slots(backend, slots, of, to, tokens=kept if first_tokens else None)
    for want, found in zip(wanted, memory, strict=True):
        assert (want == back(found)).all(), "bytes in the slots differ"


def check_copy_of_pieces(backend: Backend, seed: int) -> None:
    """Copy the same bytes of blocks from slot to slot, as a layer of blocks comes up: from one arena to another, any bytes of them."""
    rng = np.random.default_rng([seed, 3])
    heads, tokens, dim = int(rng.integers(1, 4)), int(rng.choice(BLOCK_TOKENS)), int(rng.choice([8, 64]))
    geometry = Geometry("mha", int(rng.integers(1, 4)), heads, dim, dim, str(rng.choice(DTYPES)), tokens)
    count = int(rng.integers(1, 5))
    pool = Pool.make(rng, geometry, 4 * count, 2)
    for arena in pool.arenas:
        arena[:] = rng.integers(0, 256, len(arena))
    sources, targets = ([place for place in pool.places if place[0] == arena][:count] for arena in (1, 0))
    size_bytes = geometry.block_bytes // geometry.layers
    first = int(rng.integers(geometry.layers)) * size_bytes
    if seed % 3 == 2:  # no layer, but any piece of a block
        first = 16 * int(rng.integers(geometry.block_bytes // 16))
        size_bytes = int(rng.integers(1, geometry.block_bytes - first + 1))
    wanted = [arena.copy() for arena in pool.arenas]
    for source, target in zip(sources, targets, strict=True):
        of, to = (place[1] * UNIT_BYTES + first for place in (source, target))
        wanted[0][to : to + size_bytes] = pool.arenas[1][of : of + size_bytes]
    memory, slots = pool.upload(backend)
    blocks = [backend.upload(np.array([pool.entry(place) for place in places], np.uint32)) for places in (sources, targets)]
    copy_pieces(backend, slots, (first, size_bytes), *blocks)
    for want, found in zip(wanted, memory, strict=True):
        assert (want == back(found)).all(), "bytes in the slots differ"
