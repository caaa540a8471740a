"""Times the kernels on a GPU, beside its own copies. Not yet run on a GPU.

Launches are captured in a CUDA graph and the graph is timed with the stream's events, so that Python's own time does not count.
Each figure goes round the layers of a block, more than the second-level cache holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from kvstore.bench.kernel_roofline import Gpu, Shape, layers_past_cache, pool_bytes
from kvstore.kernels.arrays import describe
from kvstore.kernels.copying import copy_blocks, engine_tensors
from kvstore.kernels.cuda import CudaBackend
from kvstore.kernels.decode import paged_decode
from kvstore.kernels.layout import SlotSpace, table_entries
from kvstore.kernels.variants import copy_variant, decode_variant, reduce_variant
from kvstore.kernels.writing import write_kv

ROUNDS = 20  # launches in a graph
WARM_UP = 3  # launches before: compilation, first touches, the clock's rise
USUAL_KHZ = 1_800_000  # kilohertz: units of the driver's clock rates, where it does not give one
USED = 0.8  # of the free memory: what a shape's slots may take
COPY_BYTES = 1 << 30  # of the yardstick: far more than any cache holds
COPY_BLOCKS = 256  # blocks of the copy between layouts: 512 MiB of Llama-3-8B's, there and back

Figures = dict[str, Any]


class Meter:
    """One GPU, what runs kernels on it, and how long things take there."""

    def __init__(self, backend: CudaBackend, cupy: Any) -> None:
        self.backend, self.cupy = backend, cupy
        self.stream = cupy.cuda.Stream(non_blocking=True)
        attributes = backend.device.attributes
        memory = backend.device.mem_info
        self.free_bytes = int(memory[0])
        clock_hz = attributes.get("ClockRate", USUAL_KHZ) * 1e3
        name = cupy.cuda.runtime.getDeviceProperties(0)["name"]
        self.gpu = Gpu(
            name.decode() if isinstance(name, bytes) else str(name), self._copy_bytes_per_s(), int(memory[1]),
            backend.multiprocessors, clock_hz, int(attributes["L2CacheSize"]),
        )  # fmt: skip

    def seconds(self, act: Callable[[int], None], rounds: int = ROUNDS) -> float:
        """What one call takes on the GPU: `act` queues its work for the i-th time."""
        self.backend.device.synchronize()  # what was queued elsewhere before, such as its inputs
        with self.stream:
            for index in range(WARM_UP):
                act(index)
            self.stream.begin_capture()
            for index in range(rounds):
                act(index)
            graph = self.stream.end_capture()
            graph.launch(self.stream)
            first, last = self.cupy.cuda.Event(), self.cupy.cuda.Event()
            first.record(self.stream)
            graph.launch(self.stream)
            last.record(self.stream)
            last.synchronize()
        return float(self.cupy.cuda.get_elapsed_time(first, last)) / 1e3 / rounds

    def _copy_bytes_per_s(self) -> float:
        """Bytes per second, read and written, of the driver's own copy within the GPU's memory."""
        size = min(COPY_BYTES, self.free_bytes // 4)
        one, other = self.cupy.zeros(size, "uint8"), self.cupy.empty(size, "uint8")
        runtime, kind = self.cupy.cuda.runtime, self.cupy.cuda.runtime.memcpyDeviceToDevice

        def copy(_: int) -> None:
            runtime.memcpyAsync(describe(other).address, describe(one).address, size, kind, self.stream.ptr)

        return 2 * size / self.seconds(copy)


def measure_decode(meter: Meter, shape: Shape) -> Figures:
    """Seconds of one layer's decode step; without figures and with a reason where it does not fit."""
    layers = layers_past_cache(shape, meter.gpu)
    geometry, needed = shape.geometry(layers), pool_bytes(shape, layers)
    if needed > USED * meter.free_bytes:
        return {"left_out": f"needs {needed} bytes, {meter.free_bytes} are free"}
    backend, rng = meter.backend, np.random.default_rng(0)
    blocks = -(-shape.context // shape.block_tokens)
    arena = _noise(meter, needed)
    order = rng.permutation(shape.batch * blocks) * geometry.slot_units
    table = backend.upload(table_entries(order).reshape(shape.batch, blocks))
    context = backend.upload(np.full(shape.batch, shape.context, np.int32))
    q, out = (backend.upload(np.full((shape.batch, shape.q_heads, shape.head_dim), 0x3C00, np.uint16)) for _ in range(2))
    slots = SlotSpace(geometry, (describe(arena).address,))
    backend.prepare([decode_variant(shape.dtype, shape.head_dim, shape.group), reduce_variant(shape.dtype, shape.head_dim)])

    def step(index: int) -> None:
        paged_decode(backend, q, out, slots, table, context, layer=index % layers, max_context=shape.context)

    seconds = meter.seconds(step, max(ROUNDS, layers))
    return {"seconds": seconds, "kv_bytes_per_s": shape.kv_bytes / seconds, "of_copy": shape.kv_bytes / seconds / meter.gpu.bytes_per_s}


def measure_copy(meter: Meter, shape: Shape) -> Figures:
    """Blocks of all layers from an engine's tensors ([2, block, token, head, dim] a layer) to slots, and back."""
    backend, geometry = meter.backend, shape.geometry(shape.layers)
    count = int(min(COPY_BLOCKS, USED * meter.free_bytes // 3 // geometry.slot_bytes))
    if count == 0:
        return {"left_out": f"a block takes {geometry.slot_bytes} bytes three times, {meter.free_bytes} are free"}
    arena = _noise(meter, count * geometry.slot_bytes)
    layer = (2, count, shape.block_tokens, shape.kv_heads, shape.head_dim)
    tensors = [meter.cupy.zeros(layer, "uint16") for _ in range(shape.layers)]
    engine = engine_tensors(backend, tensors, "kbthd")
    slots = SlotSpace(geometry, (describe(arena).address,))
    order = np.random.default_rng(0).permutation(count)
    entries, numbers = backend.upload(table_entries(order * geometry.slot_units)), backend.upload(np.arange(count, dtype=np.uint32))
    backend.prepare([copy_variant(16)])
    gather = meter.seconds(lambda _: copy_blocks(backend, engine, slots, numbers, entries))
    scatter = meter.seconds(lambda _: copy_blocks(backend, slots, engine, entries, numbers))
    moved = 2 * count * geometry.block_bytes
    found: Figures = {"blocks": count, "moved_bytes": moved, "gather_s": gather, "scatter_s": scatter}
    return found | {f"{name}_of_copy": moved / found[f"{name}_s"] / meter.gpu.bytes_per_s for name in ("gather", "scatter")}


def measure_write(meter: Meter, shape: Shape) -> Figures:
    """One new token of each sequence into its slot, for one layer."""
    backend, geometry = meter.backend, shape.geometry(shape.layers)
    arena = _noise(meter, shape.batch * geometry.slot_bytes)
    table = backend.upload(table_entries(np.arange(shape.batch) * geometry.slot_units).reshape(shape.batch, 1))
    keys, values = (backend.upload(np.zeros((shape.batch, shape.kv_heads, shape.head_dim), np.uint16)) for _ in range(2))
    starts, context = backend.upload(np.arange(shape.batch + 1, dtype=np.int32)), backend.upload(np.ones(shape.batch, np.int32))
    slots = SlotSpace(geometry, (describe(arena).address,))
    seconds = meter.seconds(lambda index: write_kv(backend, keys, values, slots, table, starts, context, layer=index % shape.layers))
    return {"seconds": seconds}


def _noise(meter: Meter, size_bytes: int) -> Any:
    """Memory full of small 16-bit numbers, all different from page to page: zeros might be compressed on their way."""
    pattern = np.random.default_rng(1).normal(size=1 << 16).astype(np.float16).view(np.uint8)
    whole = meter.cupy.empty(math.ceil(size_bytes / len(pattern)) * len(pattern), "uint8")
    whole.reshape(-1, len(pattern))[:] = meter.backend.upload(pattern)
    return whole
