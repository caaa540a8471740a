"""These tests need an engine's own venv: `make test-engines` makes it and says where it is."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.testing.daemon import DaemonProcess
from kvstore.worker.bundled import bundled_folder

collect_ignore_glob = [] if "TESTS_VLLM_PYTHON" in os.environ else ["test_vllm*.py"]


@pytest.fixture(scope="session")
def model() -> Path:
    """SmolLM2-135M as safetensors."""
    return bundled_folder()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon with room for about 130 blocks of the model's 2.8 MiB in memory, and 170 on disk."""
    with DaemonProcess(tmp_path, dram="384MiB", nvme_bytes="512MiB") as process:
        yield process
