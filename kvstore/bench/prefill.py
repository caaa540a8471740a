"""`kvstore bench prefill`: the CPU's attention of a prompt's new tokens in place, beside torch's on contiguous K and V."""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.bench.yardsticks import shared_segment
from kvstore.errors import ConfigError, InternalFault
from kvstore.geometry import Geometry
from kvstore.kernels.cpu import CpuAttention, available, slot_addresses

NAME = "prefill"
HELP = "\n".join(
    [
        "Time the CPU's attention of several new tokens of one sequence, which reads K and V where they lie in the arena.",
        "",
        "In one run, taking turns: torch's scaled_dot_product_attention on contiguous K and V, with a mask where tokens come before, as",
        "the worker calls it without the kernels (no copy of K and V for each query head); and the kernel. bfloat16, blocks of 16 tokens",
        "in shuffled slots of shared memory. Times nothing right while others run.",
    ]
)

SHAPES = ((512, 0), (512, 512), (512, 2048), (128, 1024), (256, 3072))  # new tokens, and tokens before them
BLOCK_TOKENS = 16  # tokens: the usual block
ROUNDS = 15  # calls of each: their median is steady to a few hundredths
TOLERANCE = 0.02  # share, of the greatest result: bfloat16 rounds to 0.004, and both round more than once


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures there")
    parser.add_argument("--heads", nargs=3, type=int, default=(9, 3, 64), metavar=("Q", "KV", "DIM"), help="default 9 3 64: SmolLM2-135M")
    parser.add_argument("--shape", nargs=2, type=int, action="append", metavar=("NEW", "BEFORE"), help="only this one; may be repeated")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], metavar="N", help="how many threads each gets (default 1 and 2)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"calls of each (default {ROUNDS})")


def run(args: argparse.Namespace) -> int:
    """Measure and print. Returns 0. Raises ConfigError where the kernel cannot be used, or does not serve such heads here."""
    if available():
        raise ConfigError(f"the CPU kernels cannot be used: {available()}")
    print(f"{'µs a layer':<24} {'threads':>7} {'torch':>10} {'kernel':>10}   kernel is")
    figures = []
    for new, before in args.shape or SHAPES:
        for threads in args.threads:
            found = measure(new, before, tuple(args.heads), threads, args.rounds)
            figures.append({"new": new, "before": before, "threads": threads, "seconds": found})
            head = f"{new} after {before} tokens"
            times = f"{found['torch'] * 1e6:>10.0f} {found['kernel'] * 1e6:>10.0f}"
            print(f"{head:<24} {threads:>7} {times}   {found['kernel'] / found['torch']:.2f} × torch")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


def measure(new: int, before: int, heads: tuple[int, int, int], threads: int, rounds: int) -> dict[str, float]:
    """Median seconds a layer of each. Raises InternalFault where the results differ."""
    importlib.import_module("kvstore.worker")  # says how OpenMP's threads wait, which torch reads when it is imported
    import torch

    torch.set_num_threads(threads)
    (q_heads, kv_heads, dim), total = heads, new + before
    geometry = Geometry("mha", 1, kv_heads, dim, dim, "bfloat16", BLOCK_TOKENS)
    blocks = -(-total // BLOCK_TOKENS)
    q = torch.randn((q_heads, new, dim), dtype=torch.bfloat16)
    keys, values = (torch.randn((kv_heads, total, dim), dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty((new, q_heads, dim), dtype=torch.bfloat16)
    mask = torch.ones((new, total), dtype=torch.bool).tril(before)
    scale, width = dim**-0.5, 2
    with shared_segment(blocks * geometry.slot_bytes) as arena:
        table = slot_addresses(arena.ctypes.data, np.random.default_rng(0).permutation(blocks) * geometry.slot_units)
        kernel = CpuAttention(geometry, q_heads, threads=threads)
        places = np.arange(total)
        writing = kernel.writing(table[places // BLOCK_TOKENS], (places % BLOCK_TOKENS).astype(np.int32), batch=1)
        writing.write(0, keys.data_ptr(), values.data_ptr())
        prompt = kernel.prompt(table, before, new)

        def by_torch() -> Any:
            grouped = q.view(kv_heads, -1, new, dim)
            wide = [part[:, None].expand(-1, grouped.shape[1], -1, -1) for part in (keys, values)]
            seen = mask if before else None
            return torch.nn.functional.scaled_dot_product_attention(grouped, wide[0], wide[1], seen, is_causal=not before, scale=scale)

        def by_kernel() -> bool:
            return prompt.attend(
                0, q.data_ptr(), out.data_ptr(), scale=scale, q_strides=(dim * width, new * dim * width),
                out_strides=(q_heads * dim * width, dim * width),
            )  # fmt: skip

        if not by_kernel():
            raise ConfigError("the kernel does not serve such heads on this processor; torch's attention does it there")
        wanted = by_torch().flatten(0, 1).transpose(0, 1)
        if (out - wanted).abs().max() > TOLERANCE * wanted.abs().max():
            raise InternalFault("the kernel's result is not torch's; its figures would mean nothing: please report it")
        return _by_turns({"torch": by_torch, "kernel": by_kernel}, rounds)


def _by_turns(acts: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in acts}
    for _ in range(rounds + 1):
        for name, act in acts.items():
            began_at = time.perf_counter()
            act()
            taken[name].append(time.perf_counter() - began_at)
    return {name: statistics.median(each[1:]) for name, each in taken.items()}
