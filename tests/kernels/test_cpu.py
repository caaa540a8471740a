"""The CPU kernels: as exact as their dtype allows on any shape, in every instruction set that is here, and caught where they are wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from kvstore.errors import ConfigError, GeometryError, InvalidArgument
from kvstore.geometry import Geometry, Quant
from kvstore.kernels.cpu import CpuAttention, available, instruction_sets, slot_addresses
from kvstore.kernels.cpu import library as finding
from kvstore.native.library import SWITCH
from tests.kernels.cpu_cases import Case, World, cases, check_decode, check_prompt, check_write
from tests.kernels.cpu_runner import FLAGS, SOURCES, build
from tests.kernels.elements import decode, encode
from tests.kernels.sanitizers import environment

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SANITIZERS = (
    "-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "--param=asan-instrumentation-with-call-threshold=0",
    "-fno-sanitize=alignment,null,object-size,pointer-overflow",  # what AddressSanitizer sees too, and takes long to compile
)  # fmt: skip
SMALL = Geometry("mha", 2, 2, 32, 32, "float32", 8)

unhurried = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
needs_library = pytest.mark.skipif(bool(available()), reason=available() or "it is here")
each_isa = pytest.mark.parametrize("isa", ["plain", "avx2", "avx512", "avx512_bf16"])


def find_isas() -> list[str]:
    """What this processor has, of what was compiled."""
    found, _ = finding.find()
    return instruction_sets(found) if found is not None else []


def usable(isa: str) -> str:
    found, reason = finding.find()
    if found is None or isa not in instruction_sets(found):
        pytest.skip(reason or f"this processor has no {isa}")
    return isa


@each_isa
def test_any_case_is_as_exact_as_its_dtype_allows(isa: str) -> None:
    isa = usable(isa)

    @unhurried
    @given(cases())
    def check(case: Case) -> None:
        check_decode(case, isa)

    check()


@needs_library
def test_a_prompts_tokens_attend_as_each_alone_wherever_it_is_cut() -> None:
    usable("avx512_bf16")

    @settings(unhurried, max_examples=40)
    @given(cases("bfloat16"))
    def check(case: Case) -> None:
        served = check_prompt(case)
        dims = case.geometry.kind != "mla" and case.geometry.value_dim % 16 == 0
        assert served == dims, "all heads of up to 256 numbers are served"

    check()


@needs_library
@pytest.mark.parametrize("window", [0, 100])
def test_a_long_prompt_is_as_exact_as_a_short_one(window: int) -> None:
    usable("avx512_bf16")
    for q_heads, kv_heads, dim in ((9, 3, 64), (8, 1, 128), (2, 2, 256)):
        geometry = Geometry("mha", 1, kv_heads, dim, dim, "bfloat16", 16)
        assert check_prompt(Case(geometry, q_heads, (700, 1), window=window, threads=2, seed=5))


@needs_library
def test_a_prompt_that_is_not_served_is_left_alone() -> None:
    for geometry in (SMALL, replace(SMALL, dtype="float16"), replace(SMALL, dtype="bfloat16", value_dim=24)):
        assert not check_prompt(Case(geometry, 4, (30,)))


@needs_library
@unhurried
@given(cases())
def test_new_tokens_land_where_the_geometry_says(case: Case) -> None:
    check_write(case)


@each_isa
def test_a_long_context_is_as_exact_as_a_short_one(isa: str) -> None:
    geometry = Geometry("mha", 1, 3, 64, 64, "bfloat16", 16)
    check_decode(Case(geometry, 9, (5000, 4097), threads=3), usable(isa))


@each_isa
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_results_are_rounded_to_the_nearest_even(isa: str, dtype: str) -> None:
    """Two tokens of equal weight: the mean of two neighbours lies between two numbers of the dtype, for all that there are."""
    isa, dim, top = usable(isa), 2048, 0x7BFF if dtype == "float16" else 0x7EFF
    geometry = Geometry("mha", 1, 32, 16, dim, dtype, 2)
    raw = np.minimum(np.arange(32 * dim).reshape(32, 1, dim) % 0x8000, top - 1).astype(np.uint16)
    pair = np.concatenate([raw, raw + 1], axis=1)
    pair[16:] |= 0x8000
    world = World(Case(geometry, 32, (2,)))
    views = geometry.tensor_views()[0]
    world.slot(0, 0, views["k"])[:] = 0
    world.slot(0, 0, views["v"])[:] = pair
    found = world.decode(None, isa, 1)
    assert (found[0] == encode(decode(pair, dtype).mean(axis=1), dtype)).all()


@each_isa
def test_what_is_not_a_number_stays_in_its_row(isa: str) -> None:
    isa = usable(isa)
    world = World(Case(replace(SMALL, dtype="bfloat16"), 4, (40, 40, 40)))
    clean = world.decode(None, isa, 2)
    views = world.case.geometry.tensor_views()[0]
    world.slot(1, 2, views["k"])[1, 3, 5] = 0x7FC0
    found = decode(world.decode(None, isa, 2), "bfloat16")
    assert (found[[0, 2]] == decode(clean, "bfloat16")[[0, 2]]).all()
    assert (found[1, :2] == decode(clean, "bfloat16")[1, :2]).all()
    assert np.isnan(found[1, 2:]).all()


@each_isa
def test_huge_scores_neither_overflow_nor_vanish(isa: str) -> None:
    world = World(Case(SMALL, 2, (300,), sinks=True))
    world.q = encode(1e4 * decode(world.q, "float32"), "float32")
    found = decode(world.decode(None, usable(isa), 1), "float32")
    assert np.abs(found - world.expected()).max() < 1e-3


@needs_library
def test_blocks_before_the_window_are_never_read() -> None:
    world = World(Case(SMALL, 4, (100,), window=20))
    wanted = world.decode(None, "", 1)
    nowhere = np.full(SMALL.slot_bytes, 0xFF, np.uint8)
    world.tables[0][: (100 - 20) // SMALL.block_tokens] = nowhere.ctypes.data
    assert (world.decode(None, "", 1) == wanted).all()


@needs_library
def test_rows_of_one_sequence_share_its_table() -> None:
    world = World(Case(SMALL, 4, (60,)))
    kernel = CpuAttention(SMALL, 4)
    q = np.repeat(world.q, 3, axis=0)
    together, alone = np.zeros((3, 4, 32), np.float32), np.zeros((1, 4, 32), np.float32)
    kernel.reading(world.tables * 3, [58, 59, 60]).decode(0, q.ctypes.data, together.ctypes.data, scale=0.1)
    kernel.reading(world.tables, [59]).decode(0, q.ctypes.data, alone.ctypes.data, scale=0.1)
    assert (together[1] == alone[0]).all()


@needs_library
def test_queries_and_results_may_have_strides() -> None:
    world = World(Case(SMALL, 4, (10, 20)))
    wanted = world.decode(None, "", 1)
    q = np.ascontiguousarray(np.pad(world.q, ((0, 0), (0, 3), (0, 5))).transpose(1, 0, 2))
    out = np.zeros((6, 2, 40), np.uint32)
    reading = CpuAttention(SMALL, 4).reading(world.tables, world.case.lengths)
    q_strides, out_strides = (q.strides[1], q.strides[0]), (out.strides[1], out.strides[0])
    reading.decode(0, q.ctypes.data, out.ctypes.data, scale=world.scale, q_strides=q_strides, out_strides=out_strides)
    assert (out[:4, :, :32].transpose(1, 0, 2) == wanted).all()
    assert not out[4:].any()
    assert not out[:, :, 32:].any()


@needs_library
def test_bad_input_is_an_error_that_says_what_to_do() -> None:
    kernel, table = CpuAttention(SMALL, 4), slot_addresses(0, [1, 2])
    wrong: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (GeometryError, "a multiple", lambda: CpuAttention(SMALL, 3)),
        (GeometryError, "without scales", lambda: CpuAttention(replace(SMALL, quant=Quant("symmetric", "head")), 4)),
        (GeometryError, "kv1", lambda: CpuAttention(replace(SMALL, dtype="int8"), 4)),
        (GeometryError, "up to", lambda: CpuAttention(replace(SMALL, key_dim=4096), 4)),
        (InvalidArgument, "at least 1", lambda: CpuAttention(SMALL, 4, threads=0)),
        (ConfigError, "leave isa empty", lambda: CpuAttention(SMALL, 4, isa="sse")),
        (InvalidArgument, "add its blocks", lambda: kernel.reading([table], [17])),
        (InvalidArgument, "add its blocks", lambda: kernel.reading([table], [-1])),
        (InvalidArgument, "one of each", lambda: kernel.reading([table], [1, 2])),
        (InvalidArgument, "slot_addresses", lambda: kernel.reading([table.astype(np.int32)], [1])),
        (InvalidArgument, "give others", lambda: kernel.reading([table], [1]).decode(2, 0, 0, scale=1)),
        (InvalidArgument, "add its blocks", lambda: kernel.prompt(table, 10, 7)),
        (InvalidArgument, "slot_addresses", lambda: kernel.prompt(table.astype(np.int32), 0, 2)),
        (InvalidArgument, "give others", lambda: kernel.prompt(table, 0, 2).attend(2, 0, 0, scale=1, q_strides=(0, 0), out_strides=(0, 0))),
        (InvalidArgument, "place in it", lambda: kernel.writing(table, np.array([0, 8], np.int32))),
        (InvalidArgument, "one of each", lambda: kernel.writing(table, np.array([0], np.int32))),
        (InvalidArgument, "count from 0", lambda: kernel.writing(table, np.array([0, 1], np.int32)).write(-1, 0, 0)),
    ]
    for kind, words, act in wrong:
        with pytest.raises(kind, match=words):
            act()


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
def test_an_installation_with_a_compiler_has_the_kernels() -> None:
    assert os.environ.get(SWITCH) == "off" or not available(), "`pip install -v` says what became of kvstore.kernels.cpu._native"


def test_the_kernels_can_be_switched_off_and_need_no_torch() -> None:
    code = "import sys\nfrom kvstore.kernels.cpu import available\nprint(available())\nassert 'torch' not in sys.modules"
    env = os.environ | {SWITCH: "off"}
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert SWITCH in said.stdout


def test_a_library_of_another_version_is_not_used(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    source = tmp_path / "old.c"
    source.write_text("int kv_cpu_version(void) { return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(tmp_path / "_native.so"), str(source)], check=True)
    with pytest.raises(ConfigError, match="install kvstore anew"):
        finding.load(tmp_path / "_native.so")


def outcome(library: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.kernels.cpu_runner", str(library), *words]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100, check=False)


def test_the_sanitizers_find_nothing(tmp_path: Path) -> None:
    library = build(tmp_path / "sanitized.so", SANITIZERS)
    done = outcome(library, "--examples", "40", env=environment("cc"))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "40 passed with plain" in done.stdout


@pytest.mark.parametrize("word", ["", "and its fork"])
def test_threads_share_work_without_races(tmp_path: Path, word: str) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    # The sanitizer does not follow threads into a fork.
    flags = [*FLAGS, "-O1", "-g", *([] if word else ["-fsanitize=thread"])]
    program = str(tmp_path / "pool")
    subprocess.run(["cc", *flags, "-I", str(SOURCES), "-o", program, str(HERE / "pool_check.c"), str(SOURCES / "pool.c")], check=True)
    done = subprocess.run([program, *word.split()], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


# What is planted in which file, in words, and instead of what.
FAULTS = [
    ("a wrong stride of heads", "pass.h", "kv_head * layout->key_head_bytes", "kv_head * layout->value_head_bytes"),
    ("a wrong stride of tokens", "tile.h", "key += layout->key_token_bytes", "key += layout->key_dim * 2"),
    ("another layer", "tile.h", "layer_at = pass->decode->layer", "layer_at = 0 * pass->decode->layer"),
    ("a window one token too long", "attention.c", "length - decode->window : 0", "length - decode->window - 1 : 0"),
    ("one token too many", "tile.h", "last - first < TILE ? last - first :", "last - first < TILE ? last - first + 1 :"),
    ("sums that are not rescaled", "pass.h", "if (factor != 1)", "if (factor > 1)"),
    ("weights behind the last token", "softmax.h", "scores[i] = -INFINITY", "scores[i] = scores[n - 1]"),
    ("sinks that are scaled", "attention.c", "exp2f(decode->sinks[h] * LOG2E - top)", "exp2f(decode->sinks[h] * decode->scale - top)"),
    ("chunks that forget their greatest", "attention.c", "sum += chunk[heads + h] * weight", "sum += chunk[heads + h]"),
    ("a row of sums that is read by the wrong head", "attention.c", "before * work->stride, .values_stride", "0, .values_stride"),
    ("a prompt's window one token too long", "prefill.c", "prefill->window + 1 - first", "prefill->window - first"),
    ("a prompt's sums that are not rescaled", "prefill.c", "+ v * LANES) * v_set(factors[r])", "+ v * LANES)"),
    ("a token of another sequence's source", "attention.c", "i % write->inner * write", "i * write"),
]


def caught(folder: Path, fault: tuple[str, str, str, str]) -> bool:
    """Whether the checks notice a fault planted in a copy of the sources."""
    _, name, old, new = fault
    sources = shutil.copytree(SOURCES, folder / "sources", ignore=shutil.ignore_patterns("*.so", "*.py", "__pycache__"))
    text = (sources / name).read_text(encoding="utf-8")
    assert text.count(old) >= 1, f"{old} is not in {name}"
    (sources / name).write_text(text.replace(old, new, 1), encoding="utf-8")
    plain = () if name == "prefill.c" else ("-DPLAIN_ONLY",)
    library = build(folder / "faulty.so", ("-O1", "-Wno-error", *plain), sources)
    return outcome(library, "--examples", "200").returncode != 0


@pytest.mark.parametrize("part", range(2))
def test_every_planted_fault_is_caught(tmp_path: Path, part: int) -> None:
    here = find_isas()
    faults = [fault for fault in FAULTS if fault[1] != "prefill.c" or "avx512_bf16" in here][part::2]
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda pair: caught(tmp_path / str(pair[0]), pair[1]), enumerate(faults))
        assert [fault[0] for fault, noticed in zip(faults, found, strict=True) if not noticed] == []


@needs_library
@pytest.mark.parametrize("window", [1, 20, 70])
def test_what_lies_before_a_prompts_window_does_not_matter(window: int) -> None:
    usable("avx512_bf16")
    start, count = 200, 9
    geometry = Geometry("mha", 1, 2, 64, 64, "bfloat16", 8)
    world = World(Case(geometry, 4, (start + count,), window=window))
    q = encode(world.rng.normal(size=(count, 4, 64)), "bfloat16")
    wanted = world.prompt(None, 0, start, q, 1)
    views = geometry.tensor_views()[0]
    for token in range(start - window + 1):
        for view in (views["k"], views["v"]):
            world.slot(0, token // 8, view)[:, token % 8] = 0x7FC0
    found = world.prompt(None, 0, start, q, 1)
    assert wanted is not None
    assert found is not None
    assert (found == wanted).all()
