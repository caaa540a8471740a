"""`kvstore bench kernels`: what the CUDA kernels must take by their bytes and operations; on a GPU, what they take."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvstore.bench.kernel_roofline import GPUS, Gpu, Prediction, Shape, predict_copy, predict_decode, splits_of
from kvstore.config import format_bytes
from kvstore.errors import ConfigError

NAME = "kernels"
HELP = "\n".join(
    [
        "Predict, and where there is a GPU measure, the CUDA kernels.",
        "",
        "The prediction for each shape is printed first: bytes, operations, and the time by the slower of the two. Without a GPU that is",
        "all, for the GPU named by --gpu. With one, the yardstick is the bandwidth of its own copies.",
    ]
)

MODELS = {"llama-3-8b": (32, 8, 128, 32), "llama-3-70b": (64, 8, 128, 80)}  # query heads, KV heads, head dim, layers
CONTEXTS = (1 << 10, 8 << 10, 32 << 10, 128 << 10)  # tokens
BATCHES = (1, 16, 128)  # sequences
COPY_BLOCKS = 256  # blocks: as kernel_measure copies


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures there")
    parser.add_argument("--gpu", choices=GPUS, default="h100", help="whose figures to predict with where none is here (default h100)")
    parser.add_argument("--predict-only", action="store_true", help="do not look for a GPU")
    parser.add_argument("--device", type=int, default=0, metavar="N", help="which GPU to measure (default 0)")


def run(args: argparse.Namespace) -> int:
    """Predict, measure where that can be done, print both. Returns 0."""
    figures = report(shapes(), GPUS[args.gpu], None if args.predict_only else args.device)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


def shapes() -> list[Shape]:
    """Llama-3-8B and 70B over contexts and batches."""
    return [Shape(model, *MODELS[model], batch, context) for model in MODELS for batch in BATCHES for context in CONTEXTS]


def report(chosen: Sequence[Shape], gpu: Gpu, device: int | None) -> dict[str, Any]:
    """All figures, printed on the way: predictions before anything runs. `device` None measures nothing."""
    meter, reason = None, "not asked for"
    if device is not None:
        meter, reason = _meter(device)
    if meter is not None:
        gpu = meter.gpu
    figures: dict[str, Any] = {"gpu": asdict(gpu), "measured": meter is not None, "decode": [], "copy": []}
    if meter is None:
        figures["not_measured"] = reason
        print(f"not measured: {reason}. Predictions for {gpu.name} by its maker's figures:\n")
    else:
        print(f"{gpu.name}: its own copies read and write {gpu.bytes_per_s / 1e9:,.0f} GB/s\n")
    print(f"decode, one layer{'':<20} {'splits':>6} {'K and V':>10} {'moved':>10} {'Gop':>8} {'predicted':>12} by")
    for shape in chosen:
        figures["decode"].append(_decode_line(shape, gpu))
    for model, facts in MODELS.items():
        shape = Shape(model, *facts, 1, 16)
        found = predict_copy(shape.geometry(shape.layers), COPY_BLOCKS, gpu)
        print(f"copy of {COPY_BLOCKS} blocks, {model:<24} {'':>11} {format_bytes(found.moved_bytes):>10} {_time(found):>21} {found.bound}")
        figures["copy"].append({"model": model, "predicted": _facts(found)})
    if meter is not None:
        _measure(meter, chosen, figures)
    return figures


def _decode_line(shape: Shape, gpu: Gpu) -> dict[str, Any]:
    found, splits = predict_decode(shape, gpu), splits_of(shape, gpu)
    print(
        f"{shape.model:<12} batch {shape.batch:>3} context {shape.context:>6} {splits.count:>6} {format_bytes(shape.kv_bytes):>10}"
        f" {format_bytes(found.moved_bytes):>10} {found.operations / 1e9:>8.2f} {_time(found):>12} {found.bound}"
    )
    return {"shape": asdict(shape), "splits": splits.count, "kv_bytes": shape.kv_bytes, "predicted": _facts(found), "measured": None}


def _facts(found: Prediction) -> dict[str, Any]:
    return asdict(found) | {"seconds": found.seconds, "bound": found.bound}


def _time(found: Prediction) -> str:
    return f"{found.seconds * 1e6:,.1f} µs"


def _meter(device: int) -> tuple[Any, str]:
    """A meter, or why there is none."""
    from kvstore.kernels.cuda import CudaBackend

    try:
        backend = CudaBackend(device)
    except ConfigError as error:
        return None, str(error)
    from kvstore.bench.kernel_measure import Meter

    return Meter(backend, backend.cupy), ""


def _measure(meter: Any, chosen: Sequence[Shape], figures: dict[str, Any]) -> None:
    """Measure what was predicted, and print the two side by side."""
    from kvstore.bench.kernel_measure import measure_copy, measure_decode, measure_write
    from kvstore.bench.kernel_peers import PEERS, measure_peers

    names = "".join(f" {name:>15}" for name in PEERS)
    print(f"\ndecode, one layer{'':<20} {'predicted':>12} {'measured':>12} {'of copy':>8}{names}")
    for shape, line in zip(chosen, figures["decode"], strict=True):
        line["measured"], line["peers"] = measure_decode(meter, shape), measure_peers(shape, meter.gpu, meter.free_bytes)
        share = line["measured"].get("of_copy", float("nan"))
        predicted = f"{line['predicted']['seconds'] * 1e6:,.1f} µs"
        head = f"{shape.model:<12} batch {shape.batch:>3} context {shape.context:>6}"
        others = "".join(f" {_measured(line['peers'][name]):>15}" for name in PEERS)
        print(f"{head} {predicted:>12} {_measured(line['measured']):>12} {share:>8.2f}{others}")
    for line, (model, facts) in zip(figures["copy"], MODELS.items(), strict=True):
        found = line["measured"] = measure_copy(meter, Shape(model, *facts, 1, 16))
        shares = [f"{name} {found[f'{name}_of_copy']:.2f} of copy" for name in ("gather", "scatter") if f"{name}_of_copy" in found]
        print(f"copy, {model}: {', '.join(shares) or 'left out'}")
    figures["write"] = {model: measure_write(meter, Shape(model, *facts, 64, 16)) for model, facts in MODELS.items()}


def _measured(found: dict[str, Any]) -> str:
    return f"{found['seconds'] * 1e6:,.1f} µs" if "seconds" in found else "left out"
