"""Folders of LoRA adapters as they are found: whatever cannot be read is an adapter that nobody knows, and no fault of the engine."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvstore.clients.vllm_adapters import UNKNOWN, Adapter, Adapters

WAIT_S = 30.0  # for the thread that hashes; a busy machine takes its time


def known(adapters: Adapters, path: str) -> Adapter:
    """What is known of the adapter at `path` in the end."""
    give_up_at = time.monotonic() + WAIT_S
    while (found := adapters.digest(SimpleNamespace(lora_path=path), WAIT_S)) is None:
        assert time.monotonic() < give_up_at
        time.sleep(0.001)
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = tmp_path / "adapter"
    made.mkdir()
    (made / "adapter_model.safetensors").write_bytes(b"weights")
    (made / "adapter_config.json").write_text("{}")
    return made


def test_an_adapter_is_known_by_its_files(folder: Path) -> None:
    first = known(Adapters(), str(folder))
    assert first.known
    (folder / "adapter_model.safetensors").write_bytes(b"others")
    assert known(Adapters(), str(folder)) not in (first, UNKNOWN)


def _dead_link(folder: Path) -> None:
    (folder / "adapter_model.bin").symlink_to(folder / "gone")


def _loop(folder: Path) -> None:
    (folder / "adapter_model.bin").symlink_to("adapter_model.bin")


def _folder(folder: Path) -> None:
    (folder / "adapter_model.bin").mkdir()


@pytest.mark.parametrize("spoil", [_dead_link, _loop, _folder])
def test_an_adapter_with_a_file_that_cannot_be_read_is_unknown(folder: Path, spoil: Callable[[Path], None]) -> None:
    spoil(folder)
    assert known(Adapters(), str(folder)) == UNKNOWN


@pytest.mark.parametrize("path", ["/nowhere/adapter", "organisation/adapter", "nul\0", "long" * 2000])
def test_a_path_that_is_no_folder_is_unknown(path: str) -> None:
    assert known(Adapters(), path) == UNKNOWN
