"""Which kernels there are: for each its entry function, as text that NVRTC, nvcc and the host shim compile alike."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import GeometryError

FOLDER = Path(__file__).resolve().parent
HEAD_DIMS = (64, 80, 96, 128, 256)  # values of a head that the decode kernel is built for
GROUPS = (1, 2, 4, 8)  # query heads that share one read of K and V; larger groups are taken in several parts
# Decode thread blocks on a multiprocessor, by group: of 128 threads, with at most 168 registers each, or 255.
RESIDENT_BLOCKS = {1: 3, 2: 3, 4: 3, 8: 2}
ELEMENTS = {"float16": "half_t", "bfloat16": "bf16_t", "float32": "float"}  # C++ types by torch's names
SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
VECTORS = {16: "uint4", 8: "uint2", 4: "u32", 2: "u16", 1: "u8"}  # C++ types by their bytes
DECODE_WARPS = 4  # warps: as paged_decode.cu has it
THREADS = {"paged_decode": 128, "decode_reduce": 128, "block_copy": 256, "kv_write": 128}  # of a thread block, as the .cu files have it
SOURCES = {"paged_decode": "paged_decode", "decode_reduce": "paged_decode", "block_copy": "block_copy", "kv_write": "kv_write"}
_ARGS = {"paged_decode": "DecodeArgs", "decode_reduce": "DecodeArgs", "block_copy": "CopyArgs", "kv_write": "WriteArgs"}


@dataclass(frozen=True, order=True)
class Variant:
    """One entry function: `name` is its symbol, `kernel` the template that it is made of, `parameters` the template's, in C++.

    `resident` is how many thread blocks must fit on a multiprocessor at once: it bounds the registers. 0 leaves them to the compiler.
    """

    name: str
    kernel: str
    parameters: str
    resident: int = 0

    @property
    def threads(self) -> int:
        """Threads of a thread block."""
        return THREADS[self.kernel]

    @property
    def args(self) -> str:
        """The C++ name of its arguments."""
        return _ARGS[self.kernel]

    def entry(self) -> str:
        """The entry function's text."""
        bounds = f"__launch_bounds__({self.threads}, {self.resident})" if self.resident else f"__launch_bounds__({self.threads})"
        head = f'extern "C" __global__ void {bounds} {self.name}(const __grid_constant__ {self.args} a)'
        return f"{head} {{ {self.kernel}<{self.parameters}>(a); }}\n"


def decode_variant(dtype: str, head_dim: int, group: int) -> Variant:
    """The decode kernel for a dtype, head dim and number of query heads a KV head. Raises GeometryError where there is none."""
    _check(dtype, head_dim)
    shared = min((size for size in GROUPS if size >= group), default=GROUPS[-1])
    name, parameters = f"decode_{SHORT[dtype]}_d{head_dim}_g{shared}", f"{ELEMENTS[dtype]}, {head_dim}, {shared}"
    return Variant(name, "paged_decode", parameters, RESIDENT_BLOCKS[shared])


def reduce_variant(dtype: str, head_dim: int) -> Variant:
    """The second pass of the decode. Raises GeometryError where there is none."""
    _check(dtype, head_dim)
    return Variant(f"reduce_{SHORT[dtype]}_d{head_dim}", "decode_reduce", f"{ELEMENTS[dtype]}, {head_dim}")


def copy_variant(vector_bytes: int) -> Variant:
    """The copy between layouts, in vectors of so many bytes."""
    return Variant(f"copy_{vector_bytes}", "block_copy", VECTORS[vector_bytes])


def write_variant(vector_bytes: int) -> Variant:
    """The write of new tokens, in vectors of so many bytes."""
    return Variant(f"write_{vector_bytes}", "kv_write", VECTORS[vector_bytes])


def all_variants() -> list[Variant]:
    """Every kernel that can be asked for."""
    found = [decode_variant(dtype, dim, group) for dtype in ELEMENTS for dim in HEAD_DIMS for group in GROUPS]
    found += [reduce_variant(dtype, dim) for dtype in ELEMENTS for dim in HEAD_DIMS]
    return found + [make(size) for make in (copy_variant, write_variant) for size in VECTORS]


def source_text(variants: Iterable[Variant]) -> str:
    """One program with these entries; its includes are in FOLDER."""
    chosen = sorted(set(variants))
    files = sorted({SOURCES[variant.kernel] for variant in chosen})
    return "".join(f'#include "{name}.cu"\n' for name in files) + "".join(variant.entry() for variant in chosen)


def _check(dtype: str, head_dim: int) -> None:
    if dtype not in ELEMENTS or head_dim not in HEAD_DIMS:
        raise GeometryError(
            f"no decode kernel for {dtype} and heads of {head_dim}; there is {', '.join(ELEMENTS)} and {', '.join(map(str, HEAD_DIMS))}"
        )
