"""What a decode step, or a copy of blocks, must move and calculate, and the least time that takes on a GPU: before anything is run.

The figures of a GPU are its maker's. Arithmetic is counted as the decode kernel does it, without tensor cores, in operations of one
lane: fused multiply-adds, unpackings, and the shuffles that add up a score over the lanes of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvstore.dtypes import item_bytes
from kvstore.geometry import Geometry
from kvstore.kernels.decode import Splits, choose_splits
from kvstore.kernels.variants import GROUPS, decode_variant

LANES_PER_CLOCK = 128  # lanes: operations that a multiprocessor starts a clock, on sm_80, 90 and 100
SHUFFLES_PER_CLOCK = 32  # lanes: of those, shuffles
EXPONENTIALS_PER_CLOCK = 16  # lanes: of those, powers of two
VECTOR_BYTES = 16  # bytes of one load


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU: memory in bytes per second and bytes, multiprocessors, their clock in hertz, and the second-level cache."""

    name: str
    bytes_per_s: float
    memory_bytes: int
    multiprocessors: int
    clock_hz: float
    l2_bytes: int


GPUS = {
    "a100": Gpu("A100 80 GB SXM", 2.039e12, 80 << 30, 108, 1.41e9, 40 << 20),
    "h100": Gpu("H100 80 GB SXM", 3.35e12, 80 << 30, 132, 1.83e9, 50 << 20),
    "h200": Gpu("H200 SXM", 4.8e12, 141 << 30, 132, 1.83e9, 50 << 20),
    "b200": Gpu("B200", 8.0e12, 180 << 30, 148, 1.85e9, 126 << 20),
}


@dataclass(frozen=True)
class Shape:
    """A decode step of one layer: `batch` sequences of `context` tokens each. With `layers`, the model's, for the blocks' size."""

    model: str
    q_heads: int
    kv_heads: int
    head_dim: int
    layers: int
    batch: int
    context: int
    dtype: str = "bfloat16"
    block_tokens: int = 16

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.q_heads // self.kv_heads

    def geometry(self, layers: int) -> Geometry:
        """The layout of blocks with so many layers."""
        return Geometry("mha", layers, self.kv_heads, self.head_dim, self.head_dim, self.dtype, self.block_tokens)

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one layer that the step reads."""
        return self.batch * self.context * self.geometry(1).bytes_per_token


@dataclass(frozen=True)
class Prediction:
    """Of one launch: what it moves and calculates, the time that each alone takes at least, in seconds, and what rules."""

    moved_bytes: int
    operations: int
    memory_s: float
    arithmetic_s: float

    @property
    def seconds(self) -> float:
        """The larger of the two: as if memory and arithmetic overlapped wholly."""
        return max(self.memory_s, self.arithmetic_s)

    @property
    def bound(self) -> str:
        """Which of the two it is."""
        return "memory" if self.memory_s >= self.arithmetic_s else "arithmetic"


def splits_of(shape: Shape, gpu: Gpu) -> Splits:
    """The splits that paged_decode chooses there."""
    variant = decode_variant(shape.dtype, shape.head_dim, shape.group)
    parts = -(-shape.group // GROUPS[-1])
    return choose_splits(shape.batch * shape.kv_heads * parts, shape.context, gpu.multiprocessors * variant.resident)


def predict_decode(shape: Shape, gpu: Gpu) -> Prediction:
    """One layer's decode step. Bytes: K and V once for up to 8 query heads, queries, results, table, partial sums there and back."""
    parts = -(-shape.group // GROUPS[-1])
    width, heads = item_bytes(shape.dtype), shape.batch * shape.q_heads
    splits = splits_of(shape, gpu)
    moved = shape.kv_bytes * parts + 2 * heads * shape.head_dim * width
    moved += shape.batch * shape.kv_heads * parts * -(-shape.context // shape.block_tokens) * 4
    if splits.count > 1:
        moved += 2 * heads * splits.count * (shape.head_dim + 2) * 4
    tokens = shape.batch * shape.context
    vectors = shape.head_dim * width // VECTOR_BYTES
    lanes = min(32, max(8, 2 ** math.ceil(math.log2(vectors))))
    multiplied = 2 * tokens * shape.q_heads * shape.head_dim
    unpacked = 2 * tokens * shape.kv_heads * parts * shape.head_dim if width < 4 else 0
    shuffles = tokens * shape.q_heads * lanes * int(math.log2(lanes))
    exponentials = tokens * shape.q_heads * lanes
    started = multiplied + unpacked + 2 * shuffles + 2 * exponentials  # a shuffle comes with an add, a power with a subtraction
    clocks = max(started / LANES_PER_CLOCK, shuffles / SHUFFLES_PER_CLOCK, exponentials / EXPONENTIALS_PER_CLOCK)
    return Prediction(moved, started, moved / gpu.bytes_per_s, clocks / gpu.multiprocessors / gpu.clock_hz)


def predict_copy(geometry: Geometry, blocks: int, gpu: Gpu) -> Prediction:
    """A copy of whole blocks within the GPU's memory, read once and written once. A vector takes about 40 operations to find."""
    moved = 2 * blocks * geometry.block_bytes
    operations = moved // 2 // VECTOR_BYTES * 40
    arithmetic_s = operations / LANES_PER_CLOCK / gpu.multiprocessors / gpu.clock_hz
    return Prediction(moved, operations, moved / gpu.bytes_per_s, arithmetic_s)


def pool_bytes(shape: Shape, layers: int) -> int:
    """Memory that the slots of all sequences take, with so many layers in a block."""
    return shape.batch * -(-shape.context // shape.block_tokens) * shape.geometry(layers).slot_bytes


def layers_past_cache(shape: Shape, gpu: Gpu) -> int:
    """Layers to go through in turn so that none is still in the second-level cache when it comes again; at most the model's."""
    slot_layer = max(1, pool_bytes(shape, shape.layers) // shape.layers)
    return min(shape.layers, max(1, -(-3 * gpu.l2_bytes // slot_layer)))


