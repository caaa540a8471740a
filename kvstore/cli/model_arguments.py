"""The arguments by which a command names a namespace: an identity and a geometry, from files or flags. No command of its own."""

import argparse
import json
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError, InvalidArgument
from kvstore.geometry import Geometry
from kvstore.hashing import Identity

BLOCK_TOKENS = 16  # tokens of a block where none are given: those of the worker and of transformers' client


def add_namespace_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    group = parser.add_argument_group("the namespace")
    group.add_argument("--identity", metavar="FILE", help='JSON of the identity: {"model": ..., "revision": ...}; what is absent is ""')
    group.add_argument("--geometry", metavar="FILE", help="JSON of the geometry, as Geometry.fields() gives it, or a model's config.json")
    group.add_argument("--dtype", help="with a config.json: the stored type by torch's name (default: the config's)")
    group.add_argument("--block-tokens", type=int, help=f"with a config.json: tokens per block (default {BLOCK_TOKENS})")
    group.add_argument("--shard", default="", help='the shard, where there are several: "tp0/2"')


def names_namespace(args: argparse.Namespace) -> bool:
    """Whether the arguments name a namespace. Raises InvalidArgument where they only narrow one that is not named."""
    if args.identity or args.geometry:
        return True
    narrowing = {"--dtype": args.dtype is not None, "--block-tokens": args.block_tokens is not None, "--shard": bool(args.shard)}
    if given := [flag for flag, there in narrowing.items() if there]:
        raise InvalidArgument(f"{', '.join(given)} alone names no namespace; give --identity and --geometry too")
    return False


def identity_of(args: argparse.Namespace) -> Identity:
    """The identity that the arguments name. Raises ConfigError, InvalidArgument."""
    facts = _json(args.identity) if args.identity else {}
    unknown = set(facts) - set(Identity().fields())
    if unknown:
        raise InvalidArgument(f"--identity: {', '.join(sorted(unknown))} is no field of an identity; use {', '.join(Identity().fields())}")
    return Identity(**facts)


def geometry_of(args: argparse.Namespace) -> Geometry:
    """The geometry that the arguments name. Raises ConfigError, GeometryError."""
    if not args.geometry:
        raise ConfigError("--geometry is missing; give the JSON of a geometry, or a model's config.json")
    facts = _json(args.geometry)
    if "kv_dtype" in facts:
        return Geometry.from_fields(facts)
    return Geometry.from_hf_config(facts, args.dtype, BLOCK_TOKENS if args.block_tokens is None else args.block_tokens)


def _json(path: str) -> dict[str, Any]:
    try:
        facts = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}; give a file of JSON") from error
    if not isinstance(facts, dict):
        raise ConfigError(f"{path}: a JSON object is needed")
    return facts
