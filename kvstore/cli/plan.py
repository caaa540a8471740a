"""`kvstore plan`: the capacity ledger of a model, from its config.json or from numbers."""

import argparse
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvstore.capacity import Ledger, RankShare, ledger, split
from kvstore.config import format_bytes, parse_bytes
from kvstore.errors import InvalidArgument
from kvstore.geometry import Geometry

NAME = "plan"
HELP = """How much memory a model's keys and values take, counted four ways.

  effective   the tokens that are there, a shared one once     padded   every sequence as long as the longest
  paged       whole blocks, a shared one once                  slots    these as the store keeps them, each rounded up to 4 KiB

  kvstore plan config.json --tokens 32768
  kvstore plan --layers 32 --kv-heads 8 --head-dim 128 --dtype float16 --lengths 1024,3072
  kvstore plan config.json --tokens 8192 --batch 16 --tensor-parallel 4 --dram 64GiB"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the model, the sequences and the split."""
    model = parser.add_argument_group("the model: a file, or numbers")
    model.add_argument("config", nargs="?", metavar="CONFIG.json", help="a Hugging Face config.json, or the folder that holds one")
    model.add_argument("--layers", type=_positive, help="layers that keep keys and values")
    model.add_argument("--kv-heads", type=_positive, help="KV heads per layer")
    model.add_argument("--head-dim", type=_positive, help="values per head, of keys and of values")
    model.add_argument("--latent-dim", type=_positive, help="latent attention (MLA): values of the latent, in place of heads")
    model.add_argument("--rope-dim", type=_whole, default=0, help="latent attention: values of the rotary key")
    model.add_argument("--dtype", help="type of the stored elements by torch's name (default: the config's, else bfloat16)")
    load = parser.add_argument_group("the sequences")
    load.add_argument("--tokens", type=_positive, default=8192, help="length of each sequence (default %(default)s)")
    load.add_argument("--batch", type=_positive, default=1, help="how many sequences (default %(default)s)")
    load.add_argument("--lengths", type=_lengths, metavar="N,N,...", help="lengths one by one, in place of --tokens and --batch")
    load.add_argument("--shared-tokens", type=_whole, default=0, help="leading tokens that all sequences share (default %(default)s)")
    split_group = parser.add_argument_group("where it lies")
    split_group.add_argument("--block-tokens", type=_positive, default=16, help="tokens per block (default %(default)s)")
    split_group.add_argument("--tensor-parallel", type=_positive, default=1, help="ranks that share the heads (default %(default)s)")
    split_group.add_argument("--pipeline-stages", type=_positive, default=1, help="stages that share the layers (default %(default)s)")
    split_group.add_argument("--dram", metavar="SIZE", help="memory to fill: also says how many tokens fit in it")
    parser.add_argument("--json", action="store_true", help="print the ledger as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the ledger of the whole model and of each different share."""
    geometry = _geometry(args)
    lengths = args.lengths if args.lengths is not None else [args.tokens] * args.batch
    whole = ledger(geometry, lengths, args.shared_tokens)
    shares = split(geometry, args.tensor_parallel, args.pipeline_stages) if args.tensor_parallel * args.pipeline_stages != 1 else ()
    fits = parse_bytes(args.dram) // geometry.slot_bytes * geometry.block_tokens if args.dram else None
    ranks = [(share, ledger(share.geometry, lengths, args.shared_tokens)) for share in shares]
    if args.json:
        print(json.dumps(_as_json(geometry, whole, ranks, fits), indent=2))
    else:
        print("\n".join(_as_text(geometry, whole, ranks, fits)))
    return 0


def _whole(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,15}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(text)


def _positive(text: str) -> int:
    if _whole(text) == 0:
        raise argparse.ArgumentTypeError("give at least 1")
    return int(text)


def _lengths(text: str) -> list[int]:
    return [_whole(part.strip()) for part in text.split(",")]


def _geometry(args: argparse.Namespace) -> Geometry:
    if args.config:
        return Geometry.from_hf_config(_read_config(Path(args.config)), args.dtype, args.block_tokens)
    dtype = args.dtype or "bfloat16"
    if args.layers and args.latent_dim:
        return Geometry.mla(
            layers=args.layers, latent_dim=args.latent_dim, rope_dim=args.rope_dim, dtype=dtype, block_tokens=args.block_tokens
        )
    if None in (args.layers, args.kv_heads, args.head_dim):
        raise InvalidArgument("no model given: name a config.json, or give --layers, --kv-heads and --head-dim")
    return Geometry("mha", args.layers, args.kv_heads, args.head_dim, args.head_dim, dtype, args.block_tokens)


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(f"{file}: {error.strerror}; give the path of a config.json") from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{file}: not JSON ({error}); give the path of a config.json") from error
    if not isinstance(config, dict):
        raise InvalidArgument(f"{file}: holds no JSON object; give the path of a config.json")
    return config


def _as_json(geometry: Geometry, whole: Ledger, ranks: list[tuple[RankShare, Ledger]], fits: int | None) -> dict[str, Any]:
    return {
        "geometry": geometry.fields(),
        "ledger": _ledger_json(whole),
        "ranks": [
            {"stage": share.stage, "rank": share.rank, "shard": share.shard, **_share_json(share), "ledger": _ledger_json(part)}
            for share, part in ranks
        ],
        **({} if fits is None else {"tokens_that_fit": fits}),
    }


def _ledger_json(part: Ledger) -> dict[str, int]:
    return {**asdict(part), "tail_waste_positions": part.tail_waste_positions, "tail_waste_bytes": part.tail_waste_bytes}


def _share_json(share: RankShare) -> dict[str, int]:
    return {"layers": share.geometry.layers, "kv_heads": share.geometry.kv_heads}


def _as_text(geometry: Geometry, whole: Ledger, ranks: list[tuple[RankShare, Ledger]], fits: int | None) -> list[str]:
    heads = f"latent {geometry.latent_dim} + rope {geometry.rope_dim}"
    if geometry.kind == "mha":
        heads = f"{geometry.kv_heads} KV heads × {geometry.key_dim}"
    rows = [
        ("layout", f"{geometry.layers} layers, {heads}, {geometry.dtype}, blocks of {geometry.block_tokens} tokens"),
        ("per token", f"{whole.bytes_per_token:,} bytes"),
        ("per block", f"{format_bytes(geometry.block_bytes)} (slot {format_bytes(geometry.slot_bytes)})"),
        ("effective", f"{format_bytes(whole.effective_bytes)} in {whole.effective_positions:,} positions"),
        ("padded", f"{format_bytes(whole.padded_bytes)} in {whole.padded_positions:,} positions"),
        ("paged", f"{format_bytes(whole.paged_bytes)} in {whole.paged_positions:,} positions"),
        ("blocks", f"{whole.blocks:,} physical, {whole.table_entries:,} in the block tables"),
        ("tail waste", f"{format_bytes(whole.tail_waste_bytes)} in {whole.tail_waste_positions:,} positions"),
        ("slots", format_bytes(whole.slots_bytes)),
    ]
    if fits is not None:
        rows.append(("that fits", f"{fits:,} tokens"))
    lines = [f"{name:<12}{text}" for name, text in rows]
    if ranks:
        lines += ["", "stage  rank  shard  layers  KV heads       paged"]
    for share, part in ranks:
        numbers = _share_json(share)
        paged = format_bytes(part.paged_bytes)
        lines.append(f"{share.stage:>5}{share.rank:>6}{share.shard:>7}{numbers['layers']:>8}{numbers['kv_heads']:>10}{paged:>12}")
    return lines
