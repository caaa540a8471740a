"""What a kernel is told of an array, whoever made it: numpy, CuPy, torch, or anything with an array interface. No copy is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.dtypes import item_bytes
from kvstore.errors import InvalidArgument

_NAMES = {"f8": "float64", "f4": "float32", "f2": "float16", "i8": "int64", "i4": "int32", "u4": "uint32", "u2": "uint16", "u1": "uint8"}
_WIDTHS = {"int64": 8, "int32": 4, "uint32": 4, "uint16": 2}


@dataclass(frozen=True)
class Array:
    """Where an array lies: `dtype` by torch's name, `strides_bytes` one per dimension; `on_device` in a GPU's memory."""

    address: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    dtype: str
    on_device: bool
    owner: Any

    def require(self, what: str, dtype: str, *shape: int | None) -> Array:
        """Itself. Raises InvalidArgument for another dtype or shape; None fits any size."""
        fits = len(shape) == len(self.shape) and all(want in (None, have) for want, have in zip(shape, self.shape, strict=True))
        if self.dtype != dtype or not fits:
            wanted = ", ".join("*" if size is None else str(size) for size in shape)
            raise InvalidArgument(f"{what} is {self.dtype} {list(self.shape)}; give {dtype} [{wanted}]")
        return self

    def require_dense(self, what: str, dimensions: int = 1) -> Array:
        """Itself. Raises InvalidArgument where its last `dimensions` do not lie one after the other."""
        expected = width(self.dtype)
        for size, stride in list(zip(self.shape, self.strides_bytes, strict=True))[::-1][:dimensions]:
            if size > 1 and stride != expected:
                raise InvalidArgument(f"{what} has strides {list(self.strides_bytes)} bytes; its last {dimensions} must be contiguous")
            expected *= size
        return self


def width(dtype: str) -> int:
    """Bytes of one element. Raises GeometryError for an unknown dtype."""
    return _WIDTHS.get(dtype) or item_bytes(dtype)


def describe(value: Any, dtype: str = "") -> Array:
    """The facts of an array. `dtype` is the meaning of elements that the array itself has no name for: uint16 as "bfloat16".

    Raises InvalidArgument for what is no array, or a dtype that no kernel has.
    """
    if isinstance(value, Array):
        return value
    if hasattr(value, "data_ptr"):
        size = value.element_size()
        strides = tuple(step * size for step in value.stride())
        found = Array(value.data_ptr(), tuple(value.shape), strides, str(value.dtype).removeprefix("torch."), bool(value.is_cuda), value)
    else:
        found = _from_interface(value)
    if not dtype or dtype == found.dtype:
        return found
    if width(dtype) != width(found.dtype):
        raise InvalidArgument(f"an array of {found.dtype} cannot be read as {dtype}: the elements' sizes differ")
    return Array(found.address, found.shape, found.strides_bytes, dtype, found.on_device, value)


def require_place(on_device: bool, arrays: Sequence[Array]) -> None:
    """Raises InvalidArgument for an array that does not lie where the backend can reach it."""
    for array in arrays:
        if array.on_device != on_device and array.shape and 0 not in array.shape:
            places = ("a GPU's memory", "this process's memory")
            raise InvalidArgument(f"an array {list(array.shape)} lies in {places[on_device]}, the kernels run on {places[not on_device]}")


def _from_interface(value: Any) -> Array:
    interface, on_device = getattr(value, "__cuda_array_interface__", None), True
    if interface is None:
        interface, on_device = getattr(value, "__array_interface__", None), False
    if interface is None:
        raise InvalidArgument(f"a {type(value).__name__} is no array; give one of numpy, CuPy or torch")
    kind = str(interface["typestr"])
    if kind[1:] not in _NAMES or kind[0] == ">":
        raise InvalidArgument(f"arrays of {kind} are unknown to the kernels; use one of {', '.join(_NAMES.values())}")
    shape = tuple(interface["shape"])
    strides = interface.get("strides")
    if strides is None:
        size, dense = int(kind[2:]), []
        for length in reversed(shape):
            dense.append(size)
            size *= length
        strides = tuple(reversed(dense))
    return Array(int(interface["data"][0]), shape, tuple(strides), _NAMES[kind[1:]], on_device, value)
