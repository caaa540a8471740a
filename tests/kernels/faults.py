"""Plants faults in the kernels' source, one at a time, and shows that the checks on the host shim catch each of them.

    python -m tests.kernels.faults          prints what caught each fault; exit status 1 if one was not caught

A fault is a change of one place in a copy of the sources: it must match, and the changed source must compile.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvstore.kernels.host import build
from kvstore.kernels.variants import FOLDER
from tests.kernels.runner import variants_of

ROOT = Path(__file__).resolve().parent.parent.parent
DECODE = ("decode:bfloat16:128:4", "decode:float16:80:3")
RUN_S = 90.0  # seconds for the checks of one fault: a hundred times what they take
SEEDS = 8  # of each suite: a fault may need a window, a sink, a second split to show


@dataclass(frozen=True)
class Fault:
    """`old` becomes `new` in `file`, at its first place after `after`; `suites` are run on it."""

    what: str
    file: str
    old: str
    new: str
    suites: tuple[str, ...] = DECODE
    after: str = ""


FAULTS = (
    Fault("a removed __syncthreads", "paged_decode.cu", "  __syncthreads();\n", ""),
    Fault(
        "a thread that leaves before the barrier",
        "paged_decode.cu",
        "if (begin >= end && blockIdx.x > 0) return;",
        "if (begin + static_cast<int>(threadIdx.x) >= end) return;",
    ),
    Fault(
        "a divergent shuffle",
        "paged_decode.cu",
        "sum += __shfl_xor_sync(0xffffffffu, sum, step);",
        "if (token[u] >= 0) sum += __shfl_xor_sync(0xffffffffu, sum, step);",
    ),
    Fault("one token too many", "paged_decode.cu", "if (i < end) {", "if (i <= end) {"),
    Fault("one token too few", "paged_decode.cu", "if (i < end) {", "if (i < end - 1) {"),
    Fault("a window one token too long", "paged_decode.cu", "? context - a.window :", "? context - a.window - 1 :"),
    Fault("sinks that overlap the window", "paged_decode.cu", "sinks = min(a.sink_tokens, first);", "sinks = a.sink_tokens;"),
    Fault("tokens that are not there get weight", "paged_decode.cu", "token[u] >= 0 ? sum : -__int_as_float(0x7f800000)", "sum"),
    Fault("a sum that is not rescaled", "paged_decode.cu", "    state.sum[g] *= shrink;\n", "", after="void absorb"),
    Fault("values that are not rescaled between rows", "paged_decode.cu", "state.out[g][i] *= shrink;", ";", after="void merge_rows"),
    Fault(
        "rows of a warp that are left out",
        "paged_decode.cu",
        "int step = R::LANES; step < WARP",
        "int step = R::LANES * 2; step < WARP",
        after="state.sum[g] *= shrink",
    ),
    Fault("splits that are not weighted", "paged_decode.cu", "a.partial[(first + s) * D + at] * shrink", "a.partial[(first + s) * D + at]"),
    Fault("the last split forgotten", "paged_decode.cu", "s < splits; s++) {", "s < splits - 1; s++) {"),
    Fault("keys read as values", "paged_decode.cu", "a.slots.rows, 1, kv_head", "a.slots.rows, 0, kv_head"),
    Fault(
        "query heads of another group", "paged_decode.cu", "first_head = kv_head * a.group + part * G", "first_head = (kv_head + part) * G"
    ),
    Fault(
        "a write past the shared memory", "paged_decode.cu", "values[(warp * G + g) * D + at] = ", "values[(warp * G + g + 1) * D + at] = "
    ),
    Fault("a read past a row's end", "paged_decode.cu", "token >= 0 && vector < R::VECTORS", "token >= 0"),
    Fault("the sink's weight forgotten", "paged_decode.cu", "sum * shrink + exp2_of(sink - higher)", "sum * shrink"),
    Fault("the layer forgotten", "addressing.cuh", " + layer * slots.layer_stride", ""),
    Fault(
        "a slot's offset in 32 bits",
        "addressing.cuh",
        "(static_cast<i64>(entry & UNIT_MASK) << UNIT_SHIFT)",
        "static_cast<i64>((entry & UNIT_MASK) << UNIT_SHIFT)",
        ("far",),
    ),
    Fault(
        "an engine's block in 32 bits",
        "addressing.cuh",
        "block * side.block_stride",
        "block * static_cast<u32>(side.block_stride)",
        ("far",),
    ),
    Fault("every arena taken for the first", "addressing.cuh", "slots.arena[entry >> ARENA_SHIFT]", "slots.arena[0]"),
    Fault("a division that is off", "addressing.cuh", "(__umulhi(n, by.magic) + n) >> by.shift", "__umulhi(n, by.magic) >> by.shift"),
    Fault(
        "one vector too many",
        "block_copy.cu",
        "if (first + u * COPY_THREADS < a.vectors)",
        "if (first + u * COPY_THREADS <= a.vectors)",
        ("copy",),
    ),
    Fault(
        "a copy that ends one vector early",
        "block_copy.cu",
        "if (first + u * COPY_THREADS < a.vectors)",
        "if (first + u * COPY_THREADS + 1 < a.vectors)",
        ("copy",),
    ),
    Fault("heads counted through both parts", "block_copy.cu", "head = line - part * a.heads.divisor", "head = line", ("copy",)),
    Fault("the target's strides on the source", "block_copy.cu", "row_offset(a.from.slots.rows", "row_offset(a.to.slots.rows", ("copy",)),
    Fault("a token given to the sequence before", "kv_write.cu", "starts[middle] <= token", "starts[middle] < token", ("write",)),
    Fault("tokens past the end written", "kv_write.cu", "if (token >= a.starts[a.batch]) return;", "", ("write",)),
    Fault("padded rows written", "kv_write.cu", "if (position < 0) return;", "", ("write",)),
)


def planted(fault: Fault, folder: Path) -> None:
    """Copy the sources to `folder`, with the fault in them. Raises ValueError where it does not match."""
    for pattern in ("*.cu", "*.cuh", "*.h", "*.cpp"):
        for path in FOLDER.glob(pattern):
            shutil.copy(path, folder)
    path = folder / fault.file
    text = path.read_text(encoding="utf-8")
    start = text.find(fault.after)
    at = text.find(fault.old, start)
    if start < 0 or at < 0:
        raise ValueError(f"{fault.file} has no place for {fault.what!r}: say anew what to change")
    path.write_text(text[:at] + fault.new + text[at + len(fault.old) :], encoding="utf-8")


def outcome(fault: Fault) -> str:
    """What caught a fault; empty where nothing did. Most are caught by their first suite: what the second one needs is not built then."""
    with tempfile.TemporaryDirectory() as name:
        planted(fault, Path(name))
        return next((said for suite in fault.suites if (said := _said_by(suite, Path(name)))), "")


def _said_by(suite: str, sources: Path) -> str:
    library = build(variants_of(suite), sources / "built", ("-O1",), sources)
    command = [sys.executable, "-m", "tests.kernels.runner", str(library), "--seeds", str(SEEDS), suite]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S, check=False)
    if done.returncode == 0:
        return ""
    return done.stdout.strip() if done.returncode == 1 else f"the process ended with {done.returncode}"


def main() -> int:
    """Plant all, print a line for each; the number of those that nothing caught."""
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(outcome, FAULTS))
    for fault, text in zip(FAULTS, found, strict=True):
        print(f"{'caught' if text else 'MISSED'}: {fault.what}: {text.splitlines()[0] if text else ''}")
    return sum(not text for text in found)


if __name__ == "__main__":
    sys.exit(main())
