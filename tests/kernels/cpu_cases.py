"""Cases for the CPU kernels, drawn by hypothesis: paged arenas filled through their geometry, and attention over them in float64."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.geometry import UNIT_BYTES, Geometry, TensorView
from kvstore.kernels.cpu import CpuAttention, Strides, slot_addresses
from tests.kernels.elements import RAW, Exact, Raw, allowed_error, decode, encode

DIMS = (16, 24, 40, 64, 80, 96, 128, 100, 256)
HEADS = ((1, 1), (4, 1), (9, 3), (8, 2), (4, 4), (5, 1), (14, 2), (12, 1), (32, 8))  # query heads, KV heads
BLOCKS = (1, 8, 16, 32, 64, 24)  # tokens of a block


@dataclass(frozen=True)
class Case:
    """One decode step: the shape of the model, the rows, and the options."""

    geometry: Geometry
    q_heads: int
    lengths: tuple[int, ...]
    layer: int = 0
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    arenas: int = 1
    threads: int = 1
    seed: int = 0


@st.composite
def cases(draw: st.DrawFn, only: str = "") -> Case:
    """Anything that the kernels take, or what they do of one dtype."""

    def pick(*choices: Any) -> Any:
        return draw(st.sampled_from(choices))

    dtype, tokens, layers = only or pick(*sorted(RAW)), pick(*BLOCKS), draw(st.integers(1, 3))
    if pick(False, False, False, True):
        latent, rope = pick((512, 64), (512, 64), (40, 8))
        geometry = Geometry.mla(layers=layers, latent_dim=latent, rope_dim=rope, dtype=dtype, block_tokens=tokens)
        q_heads = pick(1, 16, 18)
    else:
        q_heads, kv_heads = pick(*HEADS)
        key_dim = pick(*DIMS)
        geometry = Geometry("mha", layers, kv_heads, key_dim, pick(key_dim, key_dim, *DIMS), dtype, tokens)
    lengths = draw(st.lists(st.integers(0, pick(3, 40, 700)), min_size=1, max_size=4).filter(any))
    return Case(
        geometry, q_heads, tuple(lengths), draw(st.integers(0, layers - 1)), pick(0, 0, 1, 20, 300), pick(0.0, 0.0, 15.0),
        draw(st.booleans()), draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(0, 2**32)),
    )  # fmt: skip


@dataclass
class World:
    """Arenas whose every byte is 0xFF, not a number in any dtype, and in them the K and V of a case's rows."""

    case: Case
    keys: list[Exact] = field(default_factory=list)
    values: list[Exact] = field(default_factory=list)
    tables: list[NDArray[np.uint64]] = field(default_factory=list)

    def __post_init__(self) -> None:
        case, geometry = self.case, self.case.geometry
        self.rng = rng = np.random.default_rng(case.seed)
        blocks = [max(1, -(-length // geometry.block_tokens)) for length in case.lengths]
        room = sum(blocks) + 1
        self.arenas = [np.full(room * geometry.slot_bytes + UNIT_BYTES, 0xFF, np.uint8) for _ in range(case.arenas)]
        bases = [-(-arena.ctypes.data // UNIT_BYTES) * UNIT_BYTES for arena in self.arenas]
        places = rng.permutation(room * case.arenas)
        for count in blocks:
            mine, places = places[:count], places[count:]
            addresses = [slot_addresses(bases[place // room], [place % room * geometry.slot_units])[0] for place in mine]
            self.tables.append(np.array(addresses, np.uint64))
        self.fill()
        key_dim, _ = self.dims
        self.scale = float(1 / np.sqrt(key_dim))
        self.q = encode(3 * rng.normal(size=(len(blocks), case.q_heads, key_dim)), geometry.dtype)
        self.sinks = rng.normal(size=case.q_heads).astype(np.float32)

    @property
    def dims(self) -> tuple[int, int]:
        """Values of a key and of a value as attention sees them."""
        geometry = self.case.geometry
        if geometry.kind == "mla":
            return geometry.latent_dim + geometry.rope_dim, geometry.latent_dim
        return geometry.key_dim, geometry.value_dim

    def slot(self, row: int, block: int, view: TensorView) -> Raw:
        """A tensor in a row's block, in place."""
        address = int(self.tables[row][block]) + view.offset_bytes
        reach = sum((size - 1) * stride for size, stride in zip(view.shape, view.strides_bytes, strict=True)) + 4
        memory = memoryview((ctypes.c_uint8 * reach).from_address(address)).cast("B")
        return np.ndarray(view.shape, RAW[view.dtype], memory, 0, view.strides_bytes)

    def fill(self) -> None:
        """Random K and V in every token of every row, in the case's layer."""
        case, geometry = self.case, self.case.geometry
        views, size = geometry.tensor_views()[case.layer], geometry.block_tokens
        heads = max(geometry.kv_heads, 1)
        for row, length in enumerate(case.lengths):
            raw = [encode(self.rng.normal(size=(heads, length, dim)), geometry.dtype) for dim in self.dims]
            if geometry.kind == "mla":
                raw[1] = raw[0][:, :, : geometry.latent_dim]
            for block in range(-(-length // size)):
                tokens = slice(block * size, min((block + 1) * size, length))
                count = tokens.stop - tokens.start
                if geometry.kind == "mla":
                    self.slot(row, block, views["kv"])[:count] = raw[0][0, tokens]
                else:
                    self.slot(row, block, views["k"])[:, :count] = raw[0][:, tokens]
                    self.slot(row, block, views["v"])[:, :count] = raw[1][:, tokens]
            self.keys.append(decode(np.ascontiguousarray(raw[0]), geometry.dtype))
            self.values.append(decode(np.ascontiguousarray(raw[1]), geometry.dtype))

    def expected(self) -> Exact:
        """[row, q_head, value_dim] in float64."""
        q = decode(self.q, self.case.geometry.dtype)
        return np.array([self.expected_of(row, length, q[row]) for row, length in enumerate(self.case.lengths)])

    def expected_of(self, row: int, length: int, q: Exact) -> Exact:
        """[q_head, value_dim] in float64 of a query [q_head, key_dim] that sees a row's first `length` tokens."""
        case = self.case
        out = np.zeros((case.q_heads, self.dims[1]))
        group = case.q_heads // max(case.geometry.kv_heads, 1)
        begin = max(0, length - case.window) if case.window else 0
        for head in range(case.q_heads if length else 0):
            keys, values = self.keys[row][head // group, begin:length], self.values[row][head // group, begin:length]
            scores = keys @ q[head] * self.scale
            if case.softcap:
                scores = case.softcap * np.tanh(scores / case.softcap)
            sinks = [float(self.sinks[head])] if case.sinks else []
            top = max(scores.max(), *sinks, scores.max())
            weights = np.exp(scores - top)
            out[head] = weights @ values / (weights.sum() + sum(np.exp(sink - top) for sink in sinks))
        return out

    def prompt(self, library: Any, row: int, start: int, q: Raw, threads: int) -> Raw | None:
        """What the kernel makes of a row's tokens from `start` on, together; None where it does not serve them."""
        case = self.case
        kernel = CpuAttention(case.geometry, case.q_heads, threads=threads, library=library)
        strange = np.ascontiguousarray(q.transpose(1, 0, 2))  # heads apart, as a model's are
        out = np.full((len(q), case.q_heads, self.dims[1]), 0x7E7E, RAW[case.geometry.dtype])
        done = kernel.prompt(self.tables[row], start, len(q)).attend(
            case.layer, strange.ctypes.data, out.ctypes.data, scale=self.scale, window=case.window, softcap=case.softcap,
            sinks=self.sinks.ctypes.data if case.sinks else 0, q_strides=(strange.strides[1], strange.strides[0]),
            out_strides=(out.strides[0], out.strides[1]),
        )  # fmt: skip
        assert done or (out == 0x7E7E).all()
        return out if done else None

    def decode(self, library: Any, isa: str, threads: int, rows: Sequence[int] = ()) -> Raw:
        """What the kernel makes of these rows, or all."""
        case, rows = self.case, list(rows) or list(range(len(self.case.lengths)))
        kernel = CpuAttention(case.geometry, case.q_heads, threads=threads, isa=isa, library=library)
        q, out = self.q[rows], np.full((len(rows), case.q_heads, self.dims[1]), 0x7E7E, RAW[case.geometry.dtype])
        reading = kernel.reading([self.tables[row] for row in rows], [case.lengths[row] for row in rows])
        reading.decode(
            case.layer, q.ctypes.data, out.ctypes.data, scale=self.scale, window=case.window, softcap=case.softcap,
            sinks=self.sinks.ctypes.data if case.sinks else 0,
        )  # fmt: skip
        return out


def check_decode(case: Case, isa: str, library: Any = None) -> None:
    """The kernel's result is as near to float64's as its dtype allows, and each row's alone the same. Raises AssertionError."""
    world = World(case)
    out = world.decode(library, isa, case.threads)
    found, wanted = decode(out, case.geometry.dtype), world.expected()
    wrong = ~(np.abs(found - wanted) <= allowed_error(wanted, case.geometry.dtype))
    assert not wrong.any(), f"{isa}: {case}: {wrong.sum()} of {wrong.size} wrong, first at {np.argwhere(wrong)[0]}"
    alone = np.concatenate([world.decode(library, isa, 1, [row]) for row in range(len(case.lengths))])
    assert (alone == out).all(), f"{isa}: {case}: another result with one thread, row by row"


def check_prompt(case: Case, library: Any = None) -> bool:
    """Several new tokens of each row attend as each would alone, and the same wherever the prompt is cut. Raises AssertionError.

    False where the kernel does not serve this case, having touched nothing.
    """
    world, served = World(case), True
    geometry, rng = case.geometry, np.random.default_rng(case.seed + 1)
    for row, length in enumerate(case.lengths):
        if not length:
            continue
        start, later = sorted(rng.integers(0, length, 2).tolist())
        q = encode(3 * rng.normal(size=(length - start, case.q_heads, world.dims[0])), geometry.dtype)
        out = world.prompt(library, row, start, q, case.threads)
        if out is None:
            served = False
            continue
        exact = decode(q, geometry.dtype)
        wanted = np.array([world.expected_of(row, start + i + 1, exact[i]) for i in range(length - start)])
        near = 2 * allowed_error(wanted, geometry.dtype)  # the weights are rounded to bfloat16 too
        wrong = ~(np.abs(decode(out, geometry.dtype) - wanted) <= near)
        assert not wrong.any(), f"{case}: row {row} from {start}: {wrong.sum()} of {wrong.size} wrong, first at {np.argwhere(wrong)[0]}"
        again = world.prompt(library, row, later, q[later - start :], 1)
        assert again is not None
        assert (again == out[later - start :]).all(), f"{case}: row {row}: another result from {later} than from {start}"
    return served


def check_write(case: Case, library: Any = None) -> None:
    """New tokens land where the geometry says, from tensors of any strides, and nowhere else. Raises AssertionError."""
    geometry, rng = case.geometry, np.random.default_rng(case.seed)
    batch, inner = int(rng.integers(1, 4)), int(rng.integers(1, 5))
    world = World(Case(geometry, case.q_heads, (batch * inner * 2,), case.layer, seed=case.seed))
    before = [arena.copy() for arena in world.arenas]
    tokens = rng.permutation(batch * inner * 2)[: batch * inner]
    kernel = CpuAttention(geometry, case.q_heads, library=library)
    writing = kernel.writing(world.tables[0][tokens // geometry.block_tokens], (tokens % geometry.block_tokens).astype(np.int32), batch)
    views, latent = geometry.tensor_views()[case.layer], geometry.kind == "mla"
    sources, strides = [], []
    for name in ("latent", "rope") if latent else ("k", "v"):
        view = views[name]
        order = rng.permutation(3)  # of batch, heads and tokens in memory
        shape = (batch, max(geometry.kv_heads, 1), inner, view.shape[-1])
        source = encode(rng.normal(size=[*np.array(shape)[order], shape[3]]), geometry.dtype).transpose([*np.argsort(order), 3])
        sources.append(source)
        strides.append(Strides(*source.strides[:3]))
        for i, token in enumerate(tokens.tolist()):
            block, place = divmod(token, geometry.block_tokens)
            at = int(world.tables[0][block]) - world.arenas[0].ctypes.data
            for head in range(shape[1]):
                start = at + view.offset_bytes + (0 if latent else head * view.strides_bytes[0]) + place * view.strides_bytes[-2]
                row = np.ascontiguousarray(source[i // inner, head, i % inner]).view(np.uint8)
                before[0][start : start + len(row)] = row
    writing.write(case.layer, sources[0].ctypes.data, sources[1].ctypes.data, *strides)
    assert (world.arenas[0] == before[0]).all(), f"{case}: written otherwise"
