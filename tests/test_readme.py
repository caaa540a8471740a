"""What the README shows works as it stands there."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from kvstore.testing.daemon import DaemonProcess

README = Path(__file__).parent.parent / "README.md"


def test_the_readme_s_python_runs_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    with DaemonProcess(tmp_path, dram="192MiB") as daemon:
        monkeypatch.setenv("KVSTORE_LISTEN", str(daemon.address))
        exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out.split() == ["stored", "62", "blocks"]
    assert os.environ["KVSTORE_LISTEN"]
