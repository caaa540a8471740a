"""Launches the CPU kernels: a worker's decode attention and its writing of new K and V, a call a layer.

How exact: products and sums are in float32, whatever the dtype, and the result is rounded once, to the nearest. bfloat16 keys and
queries are multiplied as they are where the processor can. Against float64 the relative error is about 1e-6 (float32) or half a unit
in the last place (float16, bfloat16). It is not the order in which torch adds up, so results differ from torch's in the last bits.
A row's result depends on its own tokens only: not on other rows, on the number of threads, or on where its blocks lie.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.dtypes import item_bytes
from kvstore.errors import ConfigError, GeometryError, InvalidArgument
from kvstore.geometry import UNIT_BYTES, Geometry
from kvstore.kernels.cpu.library import ISAS, available, find
from kvstore.kernels.cpu.structs import Decode, Layout, Prefill, Rows, Write

DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2}  # as attention.h numbers them
MAX_DIM = 2048  # values of a key: the kernels keep four heads' queries in 32 KiB
MAX_TOKENS = 2**30  # tokens of a row: the kernels count in 32 bits
CHUNK_TOKENS = 256  # tokens of a row that one thread takes: a context of 2,048 gives eight threads work
WIDE_CHUNK_TOKENS = 512  # tokens, where a chunk's sums are as large as some hundred tokens (latent attention)
WIDE_BYTES = 64 << 10  # bytes of sums from which they are

Addresses = NDArray[np.uint64]


@dataclass(frozen=True)
class Strides:
    """Bytes from one sequence of a batch to the next, one head, and one token. Values of a token lie together."""

    batch: int
    head: int
    token: int


def slot_addresses(arena: int, units: Sequence[int] | NDArray[Any]) -> Addresses:
    """Addresses of the slots at `units` (of 4 KiB) of an arena that is mapped at address `arena`."""
    return np.asarray(units, np.uint64) * np.uint64(UNIT_BYTES) + np.uint64(arena)


class CpuAttention:
    """Decode attention of one model over blocks of one geometry. One thread at a time calls it and what it makes.

    geometry   kv1 without scales, float32, float16 or bfloat16; mha of any number of heads, or mla
    q_heads    query heads, a multiple of the geometry's KV heads
    threads    that a call may use, the caller's among them; they sleep in between
    isa        an instruction set by name ("plain", "avx2", "avx512", "avx512_bf16"); "" takes the best that is here
    Raises GeometryError for another geometry, ConfigError where the library cannot be used (see `available`).
    """

    def __init__(self, geometry: Geometry, q_heads: int, *, threads: int = 1, isa: str = "", library: ctypes.CDLL | None = None) -> None:
        self.library = library or find()[0]
        if self.library is None:
            raise ConfigError(f"the CPU kernels cannot be used: {available()}")
        if isa not in ISAS or (isa and not self.library.kv_cpu_has(ISAS[isa])):
            raise ConfigError(f"this processor has no instruction set {isa!r}; leave isa empty")
        if threads < 1:
            raise InvalidArgument(f"threads is {threads}; give at least 1")
        self.geometry, self.q_heads, self.threads, self.isa = geometry, q_heads, threads, ISAS[isa]
        self.layout = _layout(geometry, q_heads)
        # New tokens of latent attention come as two parts, latent and rope, which are one key to whoever reads.
        self.write_layout = _latent_parts(self.layout, geometry) if geometry.kind == "mla" else self.layout
        self._scratch = np.empty(0, np.float32)

    @property
    def value_dim(self) -> int:
        """Values of a head's result: the latent's, for mla."""
        return int(self.layout.value_dim)

    def reading(self, tables: Sequence[Addresses], lengths: Sequence[int] | NDArray[np.int32]) -> Reading:
        """The rows that a step's decode attends with, for all of its layers.

        tables   for each row the addresses of its blocks' slots, in order, contiguous; longer ones than needed are fine. Slots wholly
                 before a window are never read. Rows may share a table: several new tokens of one sequence are rows of rising lengths.
        lengths  [rows] tokens that each row attends to, its new one included; a row of 0 gives zeros
        The tables are kept, not copied. Raises InvalidArgument where a table is too short.
        """
        return Reading(self, tables, lengths)

    def writing(self, slots: Addresses, places: NDArray[np.int32], batch: int = 0) -> Writing:
        """Where a step's new tokens go, for all of its layers.

        slots    [tokens] the address of each token's slot       places   [tokens] its number in the block
        batch    sequences that the tokens make, each of as many, in order; 0 for one a token, as in a decode step
        Raises InvalidArgument for places outside a block, and where `batch` does not divide.
        """
        return Writing(self, slots, places, batch)

    def prompt(self, table: Addresses, start: int, count: int) -> Prompt:
        """Several new tokens of one sequence, of which `start` tokens come before them; `table` as in `reading`.

        Raises InvalidArgument where the table is too short.
        """
        return Prompt(self, table, start, count)

    def scratch(self, floats: int) -> NDArray[np.float32]:
        """Memory that the next calls may use. It grows, and is used again by every step."""
        if floats > len(self._scratch):
            self._scratch = np.empty(floats + floats // 4, np.float32)
        return self._scratch


class Reading:
    """The rows of one step. Made by `CpuAttention.reading`."""

    def __init__(self, kernel: CpuAttention, tables: Sequence[Addresses], lengths: Sequence[int] | NDArray[np.int32]) -> None:
        self.kernel, self._tables = kernel, tables
        self._lengths = np.array(lengths, np.int32)
        size = int(kernel.layout.block_tokens)
        if len(tables) != len(self._lengths) or not len(tables):
            raise InvalidArgument(f"{len(tables)} tables and {len(self._lengths)} lengths; give one of each for every row")
        for table, length in zip(tables, self._lengths.tolist(), strict=True):
            if table.dtype != np.uint64 or table.strides != (8,):
                raise InvalidArgument("a table of slots is a contiguous array of uint64; make it with slot_addresses")
            if not 0 <= length <= min(len(table) * size, MAX_TOKENS):
                raise InvalidArgument(f"a row attends to {length} tokens and its table has {len(table)} blocks of {size}; add its blocks")
        self._pointers = np.array([_address(table) for table in tables], np.uint64)
        self._rows = Rows(len(tables), kernel.threads, kernel.isa, 0, _address(self._pointers), _address(self._lengths))
        layout, width = kernel.layout, item_bytes(kernel.geometry.dtype)
        self._q_bytes, self._out_bytes = int(layout.key_dim) * width, int(layout.value_dim) * width
        self._decode = Decode()
        self._where = ctypes.addressof(layout), ctypes.addressof(self._rows), ctypes.addressof(self._decode)
        assert kernel.library is not None
        self._call = kernel.library.kv_cpu_decode
        self._floats = int(kernel.library.kv_cpu_scratch(self._where[0], self._where[1]))

    def decode(
        self,
        layer: int,
        q: int,
        out: int,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: int = 0,
        q_strides: tuple[int, int] | None = None,
        out_strides: tuple[int, int] | None = None,
    ) -> None:
        """Attention of all rows over their tokens of one layer, whose K and V must have been written.

        q        address of the queries [rows, q_heads, key_dim] in the geometry's dtype; for mla the absorbed latent ‖ rope
        out      address of the results [rows, q_heads, value_dim], in the same dtype; value_dim is the latent's for mla
        scale    what scores are multiplied by
        window   each row attends to its last `window` tokens only; 0: to all
        softcap  scores become softcap × tanh(score / softcap); 0: they stay
        sinks    address of a float32 logit [q_heads], not scaled, that takes part in each head's softmax; 0: none
        q_strides, out_strides   bytes from row to row and from head to head, where they are not contiguous
        Raises InvalidArgument for a layer that the geometry does not have and for options below 0.
        """
        kernel, decode = self.kernel, self._decode
        if not 0 <= layer < kernel.geometry.layers or window < 0 or softcap < 0:
            raise InvalidArgument(f"layer {layer} of {kernel.geometry.layers}, window {window}, softcap {softcap}: give others")
        scratch = kernel.scratch(self._floats)
        self._rows.scratch, self._rows.scratch_floats = _address(scratch), len(scratch)
        decode.q, decode.out, decode.sinks = q, out, sinks
        decode.layer, decode.window, decode.scale, decode.softcap = layer, window, scale, softcap
        decode.q_row_bytes, decode.q_head_bytes = q_strides or (self._q_bytes * kernel.q_heads, self._q_bytes)
        decode.out_row_bytes, decode.out_head_bytes = out_strides or (self._out_bytes * kernel.q_heads, self._out_bytes)
        if self._call(*self._where):
            raise ConfigError("the instruction set that was chosen is not here; leave isa empty")


class Prompt:
    """New tokens of one sequence, more than one, that attend together. Made by `CpuAttention.prompt`."""

    def __init__(self, kernel: CpuAttention, table: Addresses, start: int, count: int) -> None:
        self.kernel, self._table = kernel, table
        size = int(kernel.layout.block_tokens)
        if table.dtype != np.uint64 or table.strides != (8,):
            raise InvalidArgument("a table of slots is a contiguous array of uint64; make it with slot_addresses")
        if start < 0 or count < 1 or not start + count <= min(len(table) * size, MAX_TOKENS):
            raise InvalidArgument(f"tokens {start} to {start + count} of a table of {len(table)} blocks of {size}; add its blocks")
        self._prefill = Prefill(_address(table))
        self._prefill.start, self._prefill.count = start, count
        self._where = ctypes.addressof(kernel.layout), ctypes.addressof(self._prefill)
        assert kernel.library is not None
        self._call = kernel.library.kv_cpu_prefill

    def attend(
        self,
        layer: int,
        q: int,
        out: int,
        *,
        scale: float,
        q_strides: tuple[int, int],
        out_strides: tuple[int, int],
        window: int = 0,
        softcap: float = 0.0,
        sinks: int = 0,
    ) -> bool:
        """Causal attention of the new tokens over those of one layer up to each, whose K and V must have been written.

        q, out   addresses of the queries and the results; strides are bytes from token to token and from head to head, values of a
                 head lie together. The rest is as in `Reading.decode`.
        False, with nothing done, where it is not served: other types than bfloat16, processors without its products, keys or values of
        more than 256 numbers (or values of no whole multiple of 16). Raises InvalidArgument as `decode` does.
        """
        kernel, prefill = self.kernel, self._prefill
        if not 0 <= layer < kernel.geometry.layers or window < 0 or softcap < 0:
            raise InvalidArgument(f"layer {layer} of {kernel.geometry.layers}, window {window}, softcap {softcap}: give others")
        prefill.q, prefill.out, prefill.sinks = q, out, sinks
        prefill.layer, prefill.window, prefill.scale, prefill.softcap = layer, window, scale, softcap
        prefill.q_row_bytes, prefill.q_head_bytes = q_strides
        prefill.out_row_bytes, prefill.out_head_bytes = out_strides
        return not self._call(*self._where, kernel.threads)


class Writing:
    """Where the new tokens of one step go. Made by `CpuAttention.writing`."""

    def __init__(self, kernel: CpuAttention, slots: Addresses, places: NDArray[np.int32], batch: int) -> None:
        self.kernel = kernel
        self._slots, self._places = np.ascontiguousarray(slots, np.uint64), np.ascontiguousarray(places, np.int32)
        tokens, size = len(self._slots), int(kernel.layout.block_tokens)
        batch = batch or tokens
        if len(self._places) != tokens or not tokens or tokens % batch:
            raise InvalidArgument(f"{tokens} slots, {len(self._places)} places, {batch} sequences; give one of each for every token")
        if self._places.min() < 0 or self._places.max() >= size:
            raise InvalidArgument(f"places go from {self._places.min()} to {self._places.max()}, a block has {size}; give the place in it")
        self._write = Write(_address(self._slots), _address(self._places))
        self._write.count, self._write.inner = tokens, tokens // batch
        layout, width = kernel.write_layout, item_bytes(kernel.geometry.dtype)
        self._usual = [self._contiguous(int(dim) * width, int(layout.kv_heads)) for dim in (layout.key_dim, layout.value_dim)]
        self._set(*self._usual)
        self._where = ctypes.addressof(layout), ctypes.addressof(self._write)
        assert kernel.library is not None
        self._call = kernel.library.kv_cpu_write

    def write(self, layer: int, keys: int, values: int, key_strides: Strides | None = None, value_strides: Strides | None = None) -> None:
        """Copy one layer's new K and V into the slots.

        keys, values   addresses of [batch, kv_heads, tokens of a sequence, dim] in the geometry's dtype; for mla the latent and the
                       rotary part, [batch, 1, tokens, …]
        key_strides, value_strides   where they are not contiguous in that order
        Raises InvalidArgument for a layer that the geometry does not have.
        """
        if not 0 <= layer < self.kernel.geometry.layers:
            raise InvalidArgument(f"layer {layer} is not one of {self.kernel.geometry.layers}; count from 0")
        self._set(key_strides or self._usual[0], value_strides or self._usual[1])
        self._write.layer = layer
        self._write.source[0], self._write.source[1] = keys, values
        self._call(*self._where)

    def _contiguous(self, row_bytes: int, heads: int) -> Strides:
        inner = int(self._write.inner)
        return Strides(heads * inner * row_bytes, inner * row_bytes, row_bytes)

    def _set(self, *strides: Strides) -> None:
        for part, each in enumerate(strides):
            self._write.outer_bytes[part], self._write.head_bytes[part], self._write.inner_bytes[part] = each.batch, each.head, each.token


def _layout(geometry: Geometry, q_heads: int) -> Layout:
    if geometry.format != "kv1" or geometry.quant is not None or geometry.dtype not in DTYPES:
        raise GeometryError(f"the CPU kernels read kv1 blocks of {', '.join(DTYPES)} without scales; choose such a geometry")
    views = geometry.tensor_views()[0]
    latent = geometry.kind == "mla"
    key, value = (views["kv"], views["latent"]) if latent else (views["k"], views["v"])
    heads = 1 if latent else geometry.kv_heads
    if q_heads < 1 or q_heads % heads:
        raise GeometryError(f"{q_heads} query heads over {heads} KV heads: give a multiple")
    key_dim, value_dim = key.shape[-1], value.shape[-1]
    if max(key_dim, value_dim) > MAX_DIM:
        raise GeometryError(f"keys of {key_dim} and values of {value_dim}: the CPU kernels take up to {MAX_DIM}; use torch's attention")
    chunk = WIDE_CHUNK_TOKENS if q_heads * value_dim * 4 > WIDE_BYTES else CHUNK_TOKENS
    head_bytes = (0, 0) if latent else (key.strides_bytes[0], value.strides_bytes[0])
    return Layout(
        DTYPES[geometry.dtype], q_heads, heads, key_dim, value_dim, geometry.block_tokens, geometry.layers, chunk,
        geometry.element_bytes // geometry.layers, key.offset_bytes, value.offset_bytes, *head_bytes,
        key.strides_bytes[-2], value.strides_bytes[-2],
    )  # fmt: skip


def _latent_parts(layout: Layout, geometry: Geometry) -> Layout:
    """The same rows as two parts: the latent as keys, the rotary part as values."""
    parts = Layout.from_buffer_copy(layout)
    rope = geometry.tensor_views()[0]["rope"]
    parts.key_dim, parts.value_dim = geometry.latent_dim, rope.shape[-1]
    parts.value_at = rope.offset_bytes
    return parts


def _address(array: NDArray[Any]) -> int:
    where: int = array.__array_interface__["data"][0]
    return where
