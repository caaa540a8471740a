"""The arguments by which a command names a namespace: its digest, or an identity and a geometry from files. No command of its own."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.errors import ConfigError, InvalidArgument, NotFound
from kvstore.geometry import Geometry
from kvstore.hashing import Identity

if TYPE_CHECKING:
    from kvstore.clients.client import KVClient
    from kvstore.clients.handles import Namespace

BLOCK_TOKENS = 16  # tokens of a block where none are given: those of the worker and of transformers' client


def add_namespace_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    group = parser.add_argument_group("the namespace")
    group.add_argument("--namespace", metavar="DIGEST", help="its digest or the beginning of it, as `kvstore namespaces` lists them; or:")
    group.add_argument("--identity", metavar="FILE", help='JSON of the identity: {"model": ..., "revision": ...}; what is absent is ""')
    group.add_argument("--geometry", metavar="FILE", help="JSON of the geometry, as Geometry.fields() gives it, or a model's config.json")
    group.add_argument("--dtype", help="with a config.json: the stored type by torch's name (default: the config's)")
    group.add_argument("--block-tokens", type=int, help=f"with a config.json: tokens per block (default {BLOCK_TOKENS})")
    group.add_argument("--shard", default="", help='the shard, where there are several: "tp0/2"')


def names_namespace(args: argparse.Namespace) -> bool:
    """Whether the arguments name a namespace. Raises InvalidArgument where they only narrow one that is not named, or name two."""
    named = [flag for flag, value in (("--identity", args.identity), ("--geometry", args.geometry)) if value]
    narrowing = {"--dtype": args.dtype is not None, "--block-tokens": args.block_tokens is not None, "--shard": bool(args.shard)}
    given = [flag for flag, there in narrowing.items() if there]
    if args.namespace and (named or given):
        raise InvalidArgument(f"--namespace names a namespace already; leave out {', '.join(named + given)}")
    if given and not named:
        raise InvalidArgument(f"{', '.join(given)} alone names no namespace; give --identity and --geometry too")
    return bool(args.namespace or named)


def opened(client: KVClient, args: argparse.Namespace) -> Namespace:
    """The namespace that the arguments name. Raises ConfigError, InvalidArgument, GeometryError; NotFound for a digest of none."""
    names_namespace(args)
    if args.namespace:
        return _known(client, args.namespace.lower())
    return client.open_namespace(identity_of(args), geometry_of(args), args.shard)


def _known(client: KVClient, digest: str) -> Namespace:
    """The one namespace of which this is the digest's beginning. Its adapter and salt are not known, as they are a prompt's own."""
    from kvstore.clients.requests import Keep

    if not re.fullmatch("[0-9a-f]{4,64}", digest):
        raise InvalidArgument(f"--namespace: {digest!r} is no digest; give 4 to 64 hexadecimal digits, as `kvstore namespaces` shows them")
    found = [each for each in client.namespaces().namespaces if each.digest.hex().startswith(digest)]
    if len(found) != 1:
        raise NotFound(f"--namespace: {len(found)} namespaces begin with {digest}; see `kvstore namespaces`")
    facts = dict(found[0].facts)
    identity = Identity(**{name: facts[name] for name in Identity().fields() if name in facts})
    keep = Keep(found[0].keep.kind, found[0].keep.window_tokens)
    return client.open_namespace(identity, Geometry.from_fields(facts), facts["shard"], facts["group"], keep)


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
        missing = "--geometry is missing" if args.identity else "no namespace is named"
        raise ConfigError(f"{missing}; give --namespace with a digest of `kvstore namespaces`, or --identity and --geometry")
    facts = _json(args.geometry)
    if "kv_dtype" in facts:
        return Geometry.from_fields(facts)
    return Geometry.from_hf_config(facts, args.dtype, BLOCK_TOKENS if args.block_tokens is None else args.block_tokens)


def _json(path: str) -> dict[str, Any]:
    try:
        facts = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the path of a file of JSON") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}; give a file of JSON") from error
    if not isinstance(facts, dict):
        raise ConfigError(f'{path}: no JSON object; give one, as in {{"model": ...}}')
    return facts
