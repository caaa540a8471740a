"""The settings of the vLLM connector, from `kv_connector_extra_config`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from kvstore.errors import ConfigError

MAX_NUMBER_S = 3600  # seconds: nobody waits an hour for a block; the number of blocks has the same bound


@dataclass(frozen=True)
class Settings:
    """address          the daemon's socket or host:port; "" takes KVSTORE_LISTEN, then the daemon's own default
    acquire_timeout_s   the longest that a request waits for the store before it is computed
    save_timeout_s      the longest that a finished request's blocks are kept for a save
    revision            of the weights, where the folder's files should not be hashed: a commit, or another immutable id
    gpu                 keys and values in a GPU's memory are shared too, which has not been tried on one
    min_blocks          fewer blocks than this are computed rather than loaded
    """

    address: str = ""
    acquire_timeout_s: float = 2.0
    save_timeout_s: float = 5.0
    revision: str = ""
    min_blocks: int = 1
    gpu: bool = False

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Self:
        """Read and check them. Raises ConfigError for an unknown name or a value of another kind."""
        known: dict[str, type] = {field.name: type(field.default) for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for name, value in extra.items():
            if name not in known:
                raise ConfigError(f"kv_connector_extra_config: {name!r} is unknown; the connector has {', '.join(known)}")
            kind = known[name]
            if kind is float and type(value) is int:
                value = float(value)
            if type(value) is not kind or (isinstance(value, int | float) and not 0 <= value < MAX_NUMBER_S):
                want = {str: "give a text", bool: "give true or false"}.get(kind, f"give a {kind.__name__} from 0 to {MAX_NUMBER_S}")
                raise ConfigError(f"kv_connector_extra_config: {name} is {value!r}; {want}")
            values[name] = value
        return cls(**values)
