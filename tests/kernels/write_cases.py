"""Random writes of new tokens into slots, with every byte that must come out."""

from __future__ import annotations

import numpy as np

from kvstore.geometry import Geometry
from kvstore.kernels.backend import Backend
from kvstore.kernels.writing import write_kv
from tests.kernels.cases import BLOCK_TOKENS, UNUSED_ENTRY, Pool, back
from tests.kernels.copy_cases import DTYPES
from tests.kernels.elements import RAW


def check_write(backend: Backend, seed: int) -> None:
    """A ragged step: sequences with many, one or no new tokens, padded rows, more rows of tokens than are used, strided sources."""
    rng = np.random.default_rng([seed, 99])
    heads, size = int(rng.integers(1, 4)), int(rng.choice(BLOCK_TOKENS))
    dtype, dim = str(rng.choice(DTYPES)), int(rng.choice([3, 8, 64, 80, 128]))
    geometry = Geometry("mha", int(rng.integers(1, 4)), heads, dim, dim, dtype, size)
    batch = int(rng.integers(1, 6))
    new = rng.choice([0, 1, 1, int(rng.integers(1, 40))], batch)
    context = (new + rng.integers(0, 40, batch)).astype(np.int32)
    padded = rng.random(batch) < 0.2
    context[padded], new[padded] = 0, np.minimum(new[padded], 1)
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    tokens = int(starts[-1]) + int(rng.integers(0, 3))  # some past the end
    wide = rng.integers(0, np.iinfo(RAW[dtype]).max, (tokens, 2, heads, dim + int(rng.integers(0, 2)) * 8), RAW[dtype])
    blocks = -(-context // size)
    pool = Pool.make(rng, geometry, int(blocks.sum()) + 1, int(rng.integers(1, 3)))
    table = np.full((batch, int(blocks.max()) + 1), UNUSED_ENTRY, np.uint32)
    layer = int(rng.integers(geometry.layers))
    wanted = Pool(geometry, [arena.copy() for arena in pool.arenas])
    for row in range(batch):
        places = [pool.take() for _ in range(int(blocks[row]))]
        table[row, : len(places)] = [pool.entry(place) for place in places]
        for index in range(int(new[row]) if context[row] else 0):
            position = int(context[row]) - int(new[row]) + index
            wanted.tensors(places[position // size])[layer, :, :, position % size] = wide[starts[row] + index, :, :, :dim]
    memory, slots = pool.upload(backend)
    source = backend.upload(wide)
    keys, values = ((source.view(np.float32) if dtype == "float32" else source)[:, part, :, :dim] for part in range(2))
    arrays = [backend.upload(array) for array in (table, starts, context)]
    write_kv(backend, keys, values, slots, *arrays, layer=layer)
    for want, found in zip(wanted.arenas, memory, strict=True):
        assert (want == back(found)).all(), "bytes in the slots differ"
