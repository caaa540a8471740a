"""A C compiler that keeps what it compiled: the same words over the same text give the same object again, however often.

    python compile_once.py FOLDER COMPILER...        stands in the compiler's place; objects are kept in the folder

For tests that build the same sources several times in different ways.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path


def main() -> int:
    """The compiler's exit status."""
    folder, command = Path(sys.argv[1]), sys.argv[2:]
    if "-c" not in command or "-o" not in command:
        return subprocess.run(command, check=False).returncode  # a link, or a question
    at = command.index("-o")
    target, words = Path(command[at + 1]), command[:at] + command[at + 2 :]
    read = subprocess.run([word for word in words if word != "-c"] + ["-E"], capture_output=True, check=False)
    meant = [word for word in words if not word.startswith("-I")]  # where headers lie shows in the text
    kept = folder / (hashlib.sha256(repr(meant).encode() + read.stdout).hexdigest() + ".o")
    if read.returncode or not kept.exists():
        status = subprocess.run(command, check=False).returncode
        if status or read.returncode:
            return status
        copy = kept.with_suffix(f".{os.getpid()}")
        shutil.copy(target, copy)
        copy.replace(kept)
    else:
        shutil.copy(kept, target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
