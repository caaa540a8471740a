"""Imports SGLang on a machine without a GPU: what only compiles or looks at pictures is replaced by modules that do nothing.

Import this before anything of sglang. The classes under test are the engine's own; none of them calls what is replaced.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

from transformers.utils.import_utils import is_torchvision_available

ABSENT = ("triton", "torchvision", "tvm_ffi")


class _Nothing(types.ModuleType):
    """A module with any attribute: names of classes give classes, others decorators that leave a function as it is."""

    __version__ = "3.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[0].isupper() else _Nothing(f"{self.__name__}.{name}")

    def __call__(self, *arguments: Any, **_: Any) -> Any:
        return arguments[0] if arguments and callable(arguments[0]) else lambda function: function


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] in ABSENT else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Nothing(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


is_torchvision_available()  # remembered as it is: transformers would ask a replaced one for its version
sys.meta_path.insert(0, _Finder())
