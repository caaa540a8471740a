"""The kernels built for this machine's CPU: once for the same sources, kept in the repository's build folder."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.kernels.host import HostBackend, build, compiler
from kvstore.kernels.variants import Variant, all_variants

BUILT = Path(__file__).resolve().parent.parent.parent / "build" / "kernels"


@pytest.fixture(scope="session")
def built() -> Callable[..., Path]:
    """Builds a library, or skips the test where there is no compiler: (variants, flags) → its path."""
    try:
        compiler()
    except ConfigError as error:
        pytest.skip(str(error))

    def make(variants: Sequence[Variant], flags: Sequence[str] = ("-O2",)) -> Path:
        BUILT.mkdir(parents=True, exist_ok=True)
        with (BUILT / "lock").open("w") as lock:  # two processes that test at once would both build what neither found
            fcntl.flock(lock, fcntl.LOCK_EX)
            return build(variants, BUILT, flags)

    return make


@pytest.fixture(scope="session")
def backend(built: Callable[..., Path]) -> HostBackend:
    """All kernels, as they run on this CPU."""
    return HostBackend(built(all_variants()))
