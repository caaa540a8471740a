"""Every setting of the daemon, once: a tree of frozen dataclasses, and what is derived from it.

`[dram] bytes = "8GiB"` in the file, KVSTORE_DRAM_BYTES=8GiB in the environment and --dram-bytes 8GiB on the command line are the
same setting; a flag wins over the environment, that over the file, that over the default. A new setting is one field here.
"""

import argparse
import difflib
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError
from kvstore.service_links import service_links

KIB, MIB, GIB = 2**10, 2**20, 2**30  # bytes
ENV_PREFIX = "KVSTORE_"
API_KEY = "KVSTORE_API_KEY"  # the variable with the key that a worker asks of its clients, and that `kvstore chat` sends
# Variables of this prefix that are no settings: which file to read; off: without the compiled library; a worker's key.
NOT_SETTINGS = ("KVSTORE_CONFIG", "KVSTORE_NATIVE", API_KEY)
EXTENT_STEP_BYTES = 4 * KIB  # bytes: slots begin and end on 4 KiB
MAX_BYTES = 2**62  # bytes: far above any machine, far below what 64 bits hold
MAX_SOCKET_PATH_BYTES = 107  # what the kernel's sockaddr_un takes, without its closing zero
MAX_SECONDS = 86_400.0  # seconds, one day: a longer wait is a mistake in the unit
ALIASES = {"dram.bytes": "--dram", "nvme.path": "--nvme", "hbm.bytes": "--hbm"}

_BINARY = {f"{prefix}IB": 2 ** (10 * power) for power, prefix in enumerate("KMGTP", 1)}
_DECIMAL = {f"{prefix}B": 10 ** (3 * power) for power, prefix in enumerate("KMGTP", 1)}
_UNITS = {"": 1, "B": 1, **_BINARY, **_DECIMAL}


def setting(default: Any, text: str, **rules: Any) -> Any:
    """A field with its help and rules: `unit` ("bytes", "bytes/s", "s"), `low` and `high` (inclusive; not for the default), `choices`."""
    metadata = {"help": text, **rules}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def default_listen(env: Mapping[str, str] | None = None) -> str:
    """The socket's path where none is set: in the user's runtime directory, else in a directory of the user's under /tmp."""
    runtime = (os.environ if env is None else env).get("XDG_RUNTIME_DIR", "")
    if runtime and os.path.isdir(runtime):
        return os.path.join(runtime, "kvstore", "kvstore.sock")
    return f"/tmp/kvstore-{os.getuid()}/kvstore.sock"


def configured_listen(env: Mapping[str, str]) -> str:
    """Where clients look for the daemon: KVSTORE_LISTEN, `listen` in the file of KVSTORE_CONFIG, the default. Raises ConfigError."""
    if env.get(f"{ENV_PREFIX}LISTEN"):
        return env[f"{ENV_PREFIX}LISTEN"]
    path = env.get(f"{ENV_PREFIX}CONFIG")
    found = _from_file(Path(path)).get("listen") if path else None
    return str(_parse("listen", *found)) if found else default_listen(env)


def socket_path(address: str) -> str | None:
    """The absolute path of the socket that is named as a path, with ~ or without, or as unix:PATH; None for host:port and the like."""
    path = re.sub(r"^unix:(//(?=/))?", "", address)
    if not path or (path == address and ":" in path and not path.startswith(("/", "./", "../", "~"))):
        return None
    return os.path.abspath(os.path.expanduser(path))


@dataclass(frozen=True)
class DramSettings:
    """Host memory."""

    bytes: int = setting(2 * GIB, "size of the arena in host memory", unit="bytes", low=MIB)
    dir: str = setting("/dev/shm", "directory of the arena's file; a tmpfs")
    extent_bytes: int = setting(0, "memory given to one slot size at a time; 0 chooses by the arena's size", unit="bytes", low=2 * MIB)
    prefault: bool = setting(True, "touch the whole arena in the background, so that no request pays for a first touch")
    huge_pages: bool = setting(True, "ask the system for huge pages; without them the daemon says so and goes on")


@dataclass(frozen=True)
class HbmSettings:
    """GPU memory."""

    bytes: int = setting(0, "memory taken on each GPU for blocks; 0 for none", unit="bytes")
    devices: str = setting("all", "the GPUs to take it on: all, or their numbers, as in 0,1")

    def numbers(self, count: int) -> tuple[int, ...]:
        """The GPUs, of so many. Raises ConfigError."""
        if self.devices == "all":
            return tuple(range(count))
        if not re.fullmatch(r"[0-9]{1,4}(,[0-9]{1,4})*", self.devices):
            raise ConfigError(f"hbm.devices: {self.devices!r} names no GPUs; write all, or numbers as in 0,1")
        return tuple(dict.fromkeys(int(number) for number in self.devices.split(",")))


@dataclass(frozen=True)
class NvmeSettings:
    """The disk."""

    path: str = setting("", "directory on the disk for blocks that outlive the daemon; empty turns the disk off")
    bytes: int = setting(16 * GIB, "size of the preallocated file of blocks", unit="bytes", low=MIB)
    write: str = setting("through", "when blocks go to disk: at once, when pushed out, or never", choices=("through", "on_evict", "off"))
    write_bytes_per_s: int = setting(GIB, "the most that is written per second, since flash wears out", unit="bytes/s", low=MIB)
    durable: str = setting("process", "a write counts once it outlives the process, or a power failure too", choices=("process", "power"))
    queue_depth: int = setting(256, "the most blocks on their way to or from the disk; a thread takes up to 64 at a time", low=1, high=4096)
    threads: int = setting(2, "threads that copy and checksum; one more stands by for blocks that somebody waits for", low=1, high=64)


@dataclass(frozen=True)
class IndexSettings:
    """The index of blocks."""

    blocks: int = setting(0, "the most blocks that are known at once, over all tiers; 0 sizes it by the tiers", low=0, high=2**31 - 1)


@dataclass(frozen=True)
class SessionSettings:
    """Attached processes."""

    silence_s: float = setting(30.0, "a session that is silent this long ends", unit="s", low=1.0)
    max_sessions: int = setting(256, "sessions attached at once", low=1, high=65_536)
    limit_bytes: int = setting(0, "the most memory that one session may hold; 0 for no limit", unit="bytes")


@dataclass(frozen=True)
class LogSettings:
    """Logging."""

    level: str = setting("info", "the least severe line that is written", choices=("debug", "info", "warning", "error"))
    format: str = setting("text", "lines for a person, or one JSON object a line", choices=("text", "json"))


@dataclass(frozen=True)
class Settings:
    """The whole tree."""

    listen: str = setting(default_listen, "path of the Unix socket")
    tcp: str = setting("", "host:port to listen on as well; empty for none")
    metrics: str = setting("127.0.0.1:9464", "host:port of the Prometheus metrics; port 0 takes any free one, empty turns them off")
    dram: DramSettings = field(default_factory=DramSettings)
    hbm: HbmSettings = field(default_factory=HbmSettings)
    nvme: NvmeSettings = field(default_factory=NvmeSettings)
    index: IndexSettings = field(default_factory=IndexSettings)
    eviction: str = setting("lru", "which blocks go first when a tier is full", choices=("lru", "s3fifo", "cost"))
    verify: str = setting("transfer", "check blocks when they move between tiers, or at every read too", choices=("transfer", "read"))
    scrub_bytes_per_s: int = setting(16 * MIB, "the most that is read per second to check blocks nobody reads; 0 for none", unit="bytes/s")
    session: SessionSettings = field(default_factory=SessionSettings)
    acquire_timeout_s: float = setting(10.0, "the longest that a request waits for blocks on their way up", unit="s", low=0.001)
    log: LogSettings = field(default_factory=LogSettings)
    shutdown_s: float = setting(10.0, "how long an orderly stop may take to finish writes", unit="s", low=0.0)

    def __post_init__(self) -> None:
        if len(os.fsencode(self.listen)) > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(f"listen: {self.listen!r} is longer than the {MAX_SOCKET_PATH_BYTES} bytes a socket may have; choose another")
        if not self.listen:
            raise ConfigError("listen is empty; give the path of a socket, or leave it out for the usual one")
        if self.dram.extent_bytes % EXTENT_STEP_BYTES:
            raise ConfigError(f"dram.extent_bytes is {self.dram.extent_bytes}; give a multiple of {EXTENT_STEP_BYTES} bytes, or 0")
        if self.dram.extent_bytes > self.dram.bytes:
            raise ConfigError("dram.extent_bytes is more than dram.bytes; set 0, or a part of the arena")
        self.hbm.numbers(0)
        for name, address in (("tcp", self.tcp), ("metrics", self.metrics)):
            if address:
                split_address(name, address)


def load(flags: argparse.Namespace | None = None, env: Mapping[str, str] | None = None, file: str | Path | None = None) -> Settings:
    """The settings from all sources. `env` None takes the process's; `file` None takes --config, then KVSTORE_CONFIG, else none.

    Raises ConfigError that names the source, the setting and what it may be.
    """
    environment = os.environ if env is None else env
    path = file or getattr(flags, "config", None) or environment.get(f"{ENV_PREFIX}CONFIG")
    raw: dict[str, tuple[str, object]] = {}
    if path:
        raw.update(_from_file(Path(path)))
    raw.update(_from_env(environment))
    raw.update(_from_flags(flags))
    base = replace(Settings(), listen=default_listen(environment))
    settings: Settings = _filled(base, "", {name: _parse(name, source, value) for name, (source, value) in raw.items()})
    place = socket_path(settings.listen)
    if place is None:
        raise ConfigError(f"listen: {settings.listen!r} is no path of a socket; write one, and host:port as tcp")
    return replace(settings, listen=place)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per setting, grouped like the tree, and --config. The values are read by `load`."""
    parser.add_argument("--config", metavar="FILE", help="settings file (TOML), with the names below: [dram] bytes = \"8GiB\"")
    groups: dict[str, Any] = {}
    for name, (kind, rules, default) in _table().items():
        section = name.rpartition(".")[0]
        if section not in groups:
            groups[section] = parser.add_argument_group(section or "general")
        names = [*([ALIASES[name]] if name in ALIASES else []), _flag(name)]
        extra: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if kind is bool else {"metavar": _metavar(kind, rules)}
        text = f"{rules['help']} (default {_shown(default, rules)})".replace("%", "%%")
        groups[section].add_argument(*names, dest=f"setting.{name}", default=None, help=text, **extra)


def parse_bytes(text: str) -> int:
    """8GiB, 512MiB, 1.5KiB (binary), 8GB (decimal) or a plain number, as bytes. Raises ConfigError for anything else."""
    match = re.fullmatch(r"\s*([0-9]{1,20}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)\s*", text)
    scale = _UNITS.get(match[2].upper()) if match else None
    if match is None or scale is None:
        raise ConfigError(f"{text!r} is no size; write 8GiB, 512MiB, 8GB or a plain number of bytes")
    size = Fraction(match[1]) * scale
    if size.denominator != 1 or size > MAX_BYTES:
        raise ConfigError(f"{text!r} is no whole number of bytes up to {format_bytes(MAX_BYTES)}; write 8GiB, 512MiB or a plain number")
    return int(size)


def format_bytes(size_bytes: float) -> str:
    """A size for people: 512 B, 64.0 GiB."""
    if abs(size_bytes) < KIB:
        return f"{size_bytes:.0f} B"
    power = min(int(math.log2(abs(size_bytes)) // 10), 5)
    return f"{size_bytes / 2 ** (10 * power):.1f} {'KMGTP'[power - 1]}iB"


def split_address(name: str, address: str) -> tuple[str, int]:
    """host:port (or [v6]:port) as its two parts. Raises ConfigError that begins with `name`."""
    host, _, port = address.rpartition(":")
    if not host or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65_535:
        raise ConfigError(f"{name}: {address!r} is no address; write host:port, as in 127.0.0.1:{8000 if name == 'http' else 9464}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _table() -> dict[str, tuple[type, Mapping[str, Any], object]]:
    """Every setting by its dotted name: its type, its rules, its default."""
    return {name: (kind, rules, default) for name, kind, rules, default in _leaves(Settings(), "")}


def _leaves(node: Any, prefix: str) -> Iterator[tuple[str, type, Mapping[str, Any], object]]:
    for each in fields(node):
        value = getattr(node, each.name)
        if is_dataclass(value):
            yield from _leaves(value, f"{prefix}{each.name}.")
        else:
            yield f"{prefix}{each.name}", type(value), each.metadata, value


def _filled(node: Any, prefix: str, values: Mapping[str, object]) -> Any:
    changes: dict[str, Any] = {}
    for each in fields(node):
        name = f"{prefix}{each.name}"
        if is_dataclass(getattr(node, each.name)):
            changes[each.name] = _filled(getattr(node, each.name), f"{name}.", values)
        elif name in values:
            changes[each.name] = values[name]
    return replace(node, **changes)


def _from_file(path: Path) -> dict[str, tuple[str, object]]:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"settings file {path}: {error.strerror}; check the path given to --config") from error
    except ValueError as error:
        raise ConfigError(f"settings file {path}: {error}; write TOML: [dram] on a line, then bytes = \"8GiB\"") from error
    return {_known(name, str(path)): (str(path), value) for name, value in _flattened(tree, "")}


def _flattened(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _from_env(env: Mapping[str, str]) -> dict[str, tuple[str, object]]:
    names = {f"{ENV_PREFIX}{name.replace('.', '_').upper()}": name for name in _table()}
    found: dict[str, tuple[str, object]] = {}
    passed_over = service_links(env) | set(NOT_SETTINGS)
    for key, value in env.items():
        if key in names:
            found[names[key]] = (f"environment {key}", value)
        elif key.startswith(ENV_PREFIX) and key not in passed_over:
            raise ConfigError(f"environment {key}: no such setting{_nearest(key, names)}")
    return found


def _from_flags(flags: argparse.Namespace | None) -> dict[str, tuple[str, object]]:
    given = vars(flags) if flags else {}
    found = {key.removeprefix("setting."): value for key, value in given.items() if key.startswith("setting.") and value is not None}
    return {name: (f"flag {_flag(name)}", value) for name, value in found.items()}


def _flag(name: str) -> str:
    return f"--{name.replace('.', '-').replace('_', '-')}"


def _known(name: str, source: str) -> str:
    if name not in _table():
        raise ConfigError(f"{source}: {name}: no such setting{_nearest(name, _table())}")
    return name


def _nearest(name: str, names: Mapping[str, Any]) -> str:
    near = [each for each in names if each.startswith(name)] or difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]}?" if near else "; see kvstore serve --help"


def _parse(name: str, source: str, value: object) -> object:
    kind, rules, default = _table()[name]
    try:
        parsed = _converted(kind, rules, value)
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"{source}: {name}: {error}") from error
    low, high = rules.get("low", 0), rules.get("high", MAX_SECONDS if kind is float else MAX_BYTES)
    if kind in (int, float) and not low <= parsed <= high and parsed != default:
        range_ = f"{_shown(low, rules)} to {_shown(high, rules)}" + ("" if low <= default <= high else f", or {_shown(default, rules)}")
        raise ConfigError(f"{source}: {name} is {value}; give {range_}")
    if "choices" in rules and parsed not in rules["choices"]:
        raise ConfigError(f"{source}: {name} is {value!r}; give one of {', '.join(rules['choices'])}")
    return parsed


def _converted(kind: type, rules: Mapping[str, Any], value: object) -> Any:
    """The value in its setting's type; files bring typed values, flags and the environment text."""
    if kind is bool:
        words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
        answer = value if isinstance(value, bool) else words.get(str(value).lower())
        if answer is None:
            raise ValueError(f"{value!r} is neither yes nor no; write true or false")
        return answer
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or (kind is str and not isinstance(value, str)):
        raise ValueError(f"{value!r} is of the wrong type; give {_metavar(kind, rules)}")
    if kind is int:
        if "bytes" in rules.get("unit", ""):
            return parse_bytes(str(value))
        if not re.fullmatch(r"[0-9]{1,18}", str(value)):
            raise ValueError(f"{value!r} is no whole number; write it in plain digits")
    return kind(value)


def _metavar(kind: type, rules: Mapping[str, Any]) -> str:
    if "choices" in rules:
        return "|".join(rules["choices"])
    return {"bytes": "SIZE", "bytes/s": "SIZE", "s": "SECONDS"}.get(rules.get("unit", ""), {int: "COUNT", str: "TEXT"}.get(kind, "NUMBER"))


def _shown(value: Any, rules: Mapping[str, Any]) -> str:
    if "bytes" in rules.get("unit", ""):
        return format_bytes(value) if value else "0"
    return {"": "none", "True": "yes", "False": "no"}.get(str(value), str(value))
