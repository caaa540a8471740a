"""The chain of block hashes in C, with the processor's instructions and without, is the one that hashlib makes."""

from __future__ import annotations

import array
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import hashing
from kvstore.errors import InvalidArgument
from kvstore.hashing import block_hash, block_hashes
from kvstore.native.chain import chain_hashes
from kvstore.native.library import SWITCH, library

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "hash_chain.json").read_text(encoding="utf-8"))
needs_library = pytest.mark.skipif(library() is None, reason="the compiled library was not built, or is switched off")
roots = st.binary(min_size=32, max_size=32)
ids = st.lists(st.integers(0, 2**32 - 1), max_size=200)


@needs_library
@given(roots, ids, st.integers(1, 70), st.dictionaries(st.integers(0, 30), st.binary(max_size=150), max_size=5), st.booleans())
def test_both_make_the_same_chain(root: bytes, tokens: list[int], block_tokens: int, extras: dict[int, bytes], plain: bool) -> None:
    packed = np.array(tokens, "<u4").tobytes()
    assert chain_hashes(root, packed, block_tokens, extras, plain=plain) == hashing._chain(root, packed, block_tokens, extras)


@needs_library
@pytest.mark.parametrize("plain", [False, True])
def test_every_length_of_a_block_is_padded_right(plain: bool) -> None:
    """Each number of bytes after the last whole step, from none to all but one; and blocks of one token."""
    for size in range(130):
        extras = {0: bytes(range(size)), 1: bytes(size)}
        for block_tokens in (1, 2, 7):
            packed = np.arange(3 * block_tokens, dtype="<u4").tobytes()
            made = chain_hashes(bytes(32), packed, block_tokens, extras, plain=plain)
            assert made == hashing._chain(bytes(32), packed, block_tokens, extras)


@needs_library
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("chain", [chain for chain in GOLDEN["chains"] if not chain["extra_pairs"]], ids=lambda chain: chain["name"])
def test_the_golden_chains_are_made(chain: dict[str, Any], plain: bool) -> None:
    packed = np.array(chain["tokens"], "<u4").tobytes()
    made = chain_hashes(bytes.fromhex(chain["fingerprint"]), packed, chain["block_tokens"], {}, plain=plain)
    assert made is not None
    assert made.hex() == "".join(chain["hashes"])


@given(roots, st.lists(st.integers(0, 2**31 - 1), max_size=60), st.integers(1, 5))
def test_tokens_of_every_type_hash_alike(root: bytes, tokens: list[int], block_tokens: int) -> None:
    expected = b""
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        expected += block_hash(expected[-32:] or root, tokens[start : start + block_tokens])
    for given_as in (
        tokens,
        tuple(tokens),
        array.array("q", tokens),
        *(np.array(tokens, kind) for kind in ("i4", ">i4", "u4", "i8", "u8")),
    ):
        assert block_hashes(root, given_as, block_tokens) == expected  # type: ignore[arg-type]  # anything that numpy takes for integers


@pytest.mark.parametrize("tokens", [[1, -1], [1, 2**32], [1, 2**80], [1, 1.5], [1, "2"], [1, [2]], [1, None], [True], [1.0], [[1], [2]]])
def test_what_are_no_token_ids_is_refused_in_words(tokens: Any) -> None:
    with pytest.raises(InvalidArgument, match="token id"):
        block_hashes(bytes(32), tokens, 1)


def test_without_the_library_the_chain_is_the_same() -> None:
    program = "from kvstore.hashing import block_hashes; print(block_hashes(bytes(32), list(range(100)), 7).hex())"
    said = [
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, SWITCH: switch}, capture_output=True, text=True, check=True
        ).stdout
        for switch in ("off", "on")
    ]
    assert said[0] == said[1] == block_hashes(bytes(32), list(range(100)), 7).hex() + "\n"
