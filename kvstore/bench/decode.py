"""`kvstore bench decode`: the CPU's decode attention in place, beside torch's on contiguous K and V, gathered ones, and mere reading."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.bench.yardsticks import shared_segment
from kvstore.errors import ConfigError, InternalFault
from kvstore.geometry import UNIT_BYTES, Geometry
from kvstore.kernels.cpu import CpuAttention, available, slot_addresses

NAME = "decode"
HELP = "\n".join(
    [
        "Time the CPU's decode attention, which reads K and V where they lie in the arena.",
        "",
        "In one run, taking turns: reading the same bytes and nothing else; torch's scaled_dot_product_attention on contiguous K and V, in",
        "its fastest form (a KV head's queries as the rows of one product) and in the usual one (enable_gqa); the fastest form after",
        "gathering K and V from the arena's blocks; and the kernel. bfloat16, blocks of 16 tokens in shuffled slots of shared memory.",
        "Every call reads another layer, and all layers are more than the caches hold. Times nothing right while others run.",
    ]
)

SHAPES = ((1, 2048), (1, 8192), (8, 2048), (8, 8192))  # sequences, and tokens of each
BLOCK_TOKENS = 16  # tokens: the usual block
POOL_BYTES = 256 << 20  # bytes of all layers: far more than the caches hold
MOST_LAYERS = 64  # layers: enough for a pass of some milliseconds at the smallest shape
COLUMNS = ("read", "torch", "enable_gqa", "gather+torch", "kernel")
ROUNDS = 9  # passes of each: their median is steady to a few hundredths
TOLERANCE = 0.02  # share, of the greatest result: bfloat16 rounds to 0.004, and torch rounds more than once


@dataclass(frozen=True)
class Shape:
    """A batch of rows with equal contexts, and the model's heads."""

    batch: int
    context: int
    q_heads: int
    kv_heads: int
    dim: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of one layer's K and V."""
        return self.batch * self.context * self.kv_heads * self.dim * 2 * 2

    @property
    def layers(self) -> int:
        """Layers of the pool."""
        return max(2, min(MOST_LAYERS, POOL_BYTES // self.kv_bytes))

    @property
    def geometry(self) -> Geometry:
        """The blocks."""
        return Geometry("mha", self.layers, self.kv_heads, self.dim, self.dim, "bfloat16", BLOCK_TOKENS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures there")
    parser.add_argument("--heads", nargs=3, type=int, default=(9, 3, 64), metavar=("Q", "KV", "DIM"), help="default 9 3 64: SmolLM2-135M")
    parser.add_argument(
        "--shape", nargs=2, type=int, action="append", metavar=("BATCH", "CONTEXT"), help="only this one; may be given several times"
    )
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], metavar="N", help="how many threads each gets (default 1 and 2)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"passes of each (default {ROUNDS})")


def run(args: argparse.Namespace) -> int:
    """Measure and print. Returns 0. Raises ConfigError where the kernel cannot be used."""
    if available():
        raise ConfigError(f"the CPU kernels cannot be used: {available()}")
    shapes = [Shape(batch, context // BLOCK_TOKENS * BLOCK_TOKENS, *args.heads) for batch, context in args.shape or SHAPES]
    figures = report(shapes, args.threads, args.rounds)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


def report(shapes: Sequence[Shape], threads: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """All figures, printed on the way: microseconds a layer, and the kernel's share of torch's."""
    print(f"{'µs a layer':<22} {'threads':>7}" + "".join(f" {name:>12}" for name in COLUMNS) + "   kernel is")
    figures = []
    for shape in shapes:
        with shared_segment(_slots_bytes(shape)) as arena:
            bench = Contenders(shape, arena)
            for count in threads:
                found = bench.measure(count, rounds)
                figures.append({"shape": asdict(shape), "threads": count, "layers": shape.layers, "seconds": found})
                head, times = f"batch {shape.batch} context {shape.context:>6}", "".join(f" {found[name] * 1e6:>12.0f}" for name in COLUMNS)
                shares = ", ".join(f"{found['kernel'] / found[name]:.2f} × {name}" for name in COLUMNS[:-1])
                print(f"{head:<22} {count:>7}{times}   {shares}")
    return figures


def _slots_bytes(shape: Shape) -> int:
    return shape.batch * (shape.context // BLOCK_TOKENS) * shape.geometry.slot_bytes


class Contenders:
    """One shape's K and V, in blocks and contiguous, and what reads them. `arena` is filled here."""

    def __init__(self, shape: Shape, arena: NDArray[np.uint8]) -> None:
        import torch

        self.shape, self.torch, geometry = shape, torch, shape.geometry
        self.blocks = shape.context // BLOCK_TOKENS
        pattern = torch.randn(1 << 19, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16).view(torch.uint8).numpy()
        for start in range(0, len(arena), len(pattern)):
            arena[start : start + len(pattern)] = pattern[: len(arena) - start]
        self.units = np.random.default_rng(0).permutation(shape.batch * self.blocks).reshape(shape.batch, -1) * geometry.slot_units
        self.tables = list(slot_addresses(arena.ctypes.data, self.units))
        self.words = arena[: len(arena) // 8 * 8].view(np.int64)
        self.q = torch.randn((shape.batch, shape.q_heads, 1, shape.dim), dtype=torch.bfloat16)
        self.out = torch.empty_like(self.q)
        # A head's keys, or values, in a block are a row.
        row_items = BLOCK_TOKENS * shape.dim
        self.rows = torch.from_numpy(arena).view(torch.bfloat16).view(-1, row_items)
        heads = np.arange(2)[:, None, None, None] * shape.kv_heads + np.arange(shape.kv_heads)[:, None]
        starts = self.units * (UNIT_BYTES // 2) // row_items
        self.index = torch.from_numpy((heads + starts[:, None, :]).ravel())
        self.scratch = torch.empty((len(self.index), row_items), dtype=torch.bfloat16)
        self.contiguous = [self._gathered(layer).clone() for layer in range(shape.layers)]
        self.readers = ThreadPoolExecutor(8)

    def measure(self, threads: int, rounds: int) -> dict[str, float]:
        """Median seconds a layer of each, with so many threads. Raises InternalFault where the results differ."""
        self.torch.set_num_threads(threads)
        kernel = CpuAttention(self.shape.geometry, self.shape.q_heads, threads=threads)
        reading = kernel.reading(self.tables, [self.shape.context] * self.shape.batch)
        q, out, scale = self.q.data_ptr(), self.out.data_ptr(), self.shape.dim**-0.5
        acts: dict[str, Callable[[int], object]] = {
            "read": lambda layer: self._read(layer, threads),
            "torch": lambda layer: self._torch(self.contiguous[layer]),
            "enable_gqa": lambda layer: self._enable_gqa(self.contiguous[layer]),
            "gather+torch": lambda layer: self._torch(self._gathered(layer)),
            "kernel": lambda layer: reading.decode(layer, q, out, scale=scale),
        }
        acts["kernel"](0)
        wanted = self._torch(self.contiguous[0])
        if (self.out - wanted).abs().max() > TOLERANCE * wanted.abs().max():
            raise InternalFault("the kernel's result is not torch's; its figures would mean nothing: please report it")
        taken: dict[str, list[float]] = {name: [] for name in acts}
        for _ in range(rounds + 1):
            for name, act in acts.items():
                began_at = time.perf_counter()
                for layer in range(self.shape.layers):
                    act(layer)
                taken[name].append((time.perf_counter() - began_at) / self.shape.layers)
        return {name: statistics.median(each[1:]) for name, each in taken.items()}

    def _read(self, layer: int, threads: int) -> None:
        """Reads as many bytes as a layer's K and V, in one piece a thread."""
        words = self.shape.kv_bytes // 8
        part = words // threads
        pieces = [self.words[layer * words + i * part : layer * words + (i + 1) * part] for i in range(threads)]
        if threads == 1:
            pieces[0].sum()
        else:
            list(self.readers.map(np.sum, pieces))

    def _torch(self, both: Any) -> Any:
        q = self.q.view(self.shape.batch, self.shape.kv_heads, -1, self.shape.dim)
        return self.torch.nn.functional.scaled_dot_product_attention(q, both[0], both[1]).view(self.q.shape)

    def _enable_gqa(self, both: Any) -> Any:
        return self.torch.nn.functional.scaled_dot_product_attention(self.q, both[0], both[1], enable_gqa=True)

    def _gathered(self, layer: int) -> Any:
        """[2, batch, kv_heads, context, dim]."""
        shape = self.shape
        self.torch.index_select(self.rows, 0, self.index + layer * 2 * shape.kv_heads, out=self.scratch)
        return self.scratch.view(2, shape.batch, shape.kv_heads, shape.context, shape.dim)
