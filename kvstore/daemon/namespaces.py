"""The namespaces that are open: what each is, whose it is, and its facts on disk. Owned by the event loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvstore import errors
from kvstore.cache.core import Cache
from kvstore.cache.messages import Keep, KeepKind, NamespaceSpec, Refused
from kvstore.daemon import wire
from kvstore.daemon.jobs import NamespaceFacts
from kvstore.geometry import Geometry, namespace_fields
from kvstore.hashing import namespace_digest
from kvstore.proto import kvstore_pb2 as pb

MAX_NAMESPACES = 4096  # namespaces: each is a model, a shard and a KV group; a machine serves tens of models


@dataclass(frozen=True)
class KnownNamespace:
    id: int
    tenant: str
    digest: bytes
    fields: Mapping[str, str]  # what the digest is of
    geometry: Geometry
    keep: Keep
    tails: bool = False  # for the rest of this run: blocks of an earlier one have no token ids

    def stored_facts(self) -> dict[str, Any]:
        """JSON that `Namespaces.reopen` reads back."""
        keep = {"kind": self.keep.kind.value, "window_blocks": self.keep.window_blocks}
        return {"tenant": self.tenant, "fields": dict(self.fields), "keep": keep}


class Namespaces:
    """By id. `facts` is what the mover looks blocks' sizes and digests up in."""

    def __init__(self, cache: Cache) -> None:
        self.facts: dict[int, NamespaceFacts] = {}
        self.also: Callable[[int, NamespaceSpec], None] | None = None  # opens it in the cores of pools, under the same id
        self._cache = cache
        self._open: dict[int, KnownNamespace] = {}

    def open(self, tenant: str, request: pb.OpenNamespaceRequest) -> KnownNamespace:
        """The namespace of these facts, new or known. Raises InvalidArgument, LimitExceeded."""
        geometry = wire.geometry_of(request.geometry)
        shard, kv_group = wire.text_of(request.shard, "shard"), wire.text_of(request.kv_group, "kv_group")
        fields = namespace_fields(tenant, wire.identity_of(request), geometry, shard, kv_group)
        if request.tails:
            wire.check_tails(geometry)
        return self._opened(tenant, fields, geometry, wire.keep_of(request.keep, geometry.block_tokens), request.tails)

    def reopen(self, facts: Mapping[str, Any]) -> KnownNamespace:
        """A namespace of an earlier run, from what `stored_facts` gave. Raises FormatError."""
        try:
            fields = {str(name): str(value) for name, value in facts["fields"].items()}
            keep = Keep(KeepKind(facts["keep"]["kind"]), int(facts["keep"]["window_blocks"]))
            return self._opened(str(facts["tenant"]), fields, Geometry.from_fields(fields), keep)
        except (KeyError, TypeError, ValueError, AttributeError, errors.CallerError) as error:
            raise errors.FormatError(f"a stored namespace cannot be read ({error}); `kvstore fsck` says what it is") from error

    def require(self, tenant: str, namespace: int) -> KnownNamespace:
        """The namespace, if this tenant has it open. Raises NotFound."""
        found = self._open.get(namespace)
        if found is None or found.tenant != tenant:
            raise errors.NotFound(f"namespace {namespace} is not open; call OpenNamespace first")
        return found

    def get(self, namespace: int) -> KnownNamespace | None:
        """The namespace of any tenant."""
        return self._open.get(namespace)

    def of_tenant(self, tenant: str) -> list[KnownNamespace]:
        """All namespaces that this tenant has open."""
        return [each for each in self._open.values() if each.tenant == tenant]

    def _opened(self, tenant: str, fields: Mapping[str, str], geometry: Geometry, keep: Keep, tails: bool = False) -> KnownNamespace:
        digest = namespace_digest(fields)
        spec = NamespaceSpec(tenant, digest, geometry.slot_units, geometry.block_bytes, keep, geometry.block_tokens, tails)
        known = next((each for each in self.of_tenant(tenant) if each.digest == digest), None)
        if known is None and len(self._open) >= MAX_NAMESPACES:
            raise errors.LimitExceeded(f"{MAX_NAMESPACES} namespaces are open, which is the most; restart the daemon to forget unused ones")
        answer = self._cache.open_namespace(spec)
        if isinstance(answer, Refused):
            raise wire.refusal(answer)
        if self.also is not None:
            self.also(answer, spec)
        self.facts[answer] = NamespaceFacts(digest, geometry.slot_units, geometry.block_bytes)
        tails = tails or (known is not None and known.tails)
        self._open[answer] = KnownNamespace(answer, tenant, digest, dict(fields), geometry, keep, tails)
        return self._open[answer]
