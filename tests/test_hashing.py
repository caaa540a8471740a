"""Identity, fingerprint and the chain of block hashes."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidArgument
from kvstore.hashing import (
    Identity,
    block_hash,
    block_hashes,
    canonical_json,
    fingerprint,
    namespace_digest,
    opaque_block_hash,
    usable_blocks,
)

GOLDEN: Mapping[str, Any] = json.loads((Path(__file__).parent / "golden" / "hash_chain.json").read_text(encoding="utf-8"))
ROOT = fingerprint(Identity(model="m"))
FIELDS = ("model", "revision", "adapter", "tokenizer", "dtype", "salt")

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
tokens_of_blocks = st.lists(st.integers(0, 2**32 - 1), max_size=40)
pairs = st.lists(st.tuples(st.binary(max_size=4), st.binary(max_size=4)), max_size=4, unique=True)


def _extras(chain: Mapping[str, Any]) -> dict[int, list[tuple[bytes, bytes]]]:
    return {int(block): [(bytes.fromhex(t), bytes.fromhex(v)) for t, v in pairs] for block, pairs in chain["extra_pairs"].items()}


@pytest.mark.parametrize("chain", GOLDEN["chains"], ids=lambda chain: chain["name"])
def test_a_chain_has_its_golden_hashes(chain: Mapping[str, Any]) -> None:
    root = fingerprint(Identity(**chain["identity"]))
    assert root.hex() == chain["fingerprint"]
    assert block_hashes(root, chain["tokens"], chain["block_tokens"], _extras(chain)).hex() == "".join(chain["hashes"])


@pytest.mark.parametrize("vector", GOLDEN["opaque"], ids=lambda vector: vector["scheme"])
def test_an_engines_hash_has_its_golden_name(vector: Mapping[str, str]) -> None:
    name = opaque_block_hash(bytes.fromhex(vector["fingerprint"]), vector["scheme"], bytes.fromhex(vector["engine_hash"]))
    assert name.hex() == vector["block_hash"]


@pytest.mark.parametrize("vector", GOLDEN["namespace_encoding"], ids=lambda vector: vector["digest"][:8])
def test_a_namespace_has_its_golden_digest(vector: Mapping[str, Any]) -> None:
    assert namespace_digest(vector["fields"]).hex() == vector["digest"]


def test_three_processes_with_other_hash_seeds_agree() -> None:
    code = (
        "from kvstore.hashing import *\n"
        "root = fingerprint(Identity(model='模型', salt='s'))\n"
        "print((root + block_hashes(root, range(100), 16, {2: [(b'b', b'2'), (b'a', b'1')]})).hex())"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True)
        for seed in ("0", "1", "4242")
    ]
    assert len({run.stdout for run in runs}) == 1
    assert len(runs[0].stdout.strip()) == 2 * 32 * 7


@given(st.dictionaries(st.sampled_from(FIELDS), texts), st.dictionaries(st.sampled_from(FIELDS), texts))
def test_other_identities_have_other_fingerprints(one: dict[str, str], two: dict[str, str]) -> None:
    same = Identity(**one) == Identity(**two)
    assert (fingerprint(Identity(**one)) == fingerprint(Identity(**two))) == same


@given(texts.filter(bool), st.permutations(FIELDS))
def test_a_value_moved_to_another_field_shares_nothing(value: str, order: list[str]) -> None:
    assert fingerprint(Identity(**{order[0]: value})) != fingerprint(Identity(**{order[1]: value}))


@given(tokens_of_blocks, st.integers(1, 9))
def test_a_chain_is_its_blocks_hashed_one_by_one(tokens: list[int], block_tokens: int) -> None:
    parent, packed = ROOT, b""
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        parent = block_hash(parent, tokens[start : start + block_tokens])
        packed += parent
    assert block_hashes(ROOT, tokens, block_tokens) == packed
    assert block_hashes(ROOT, np.asarray(tokens, np.int64), block_tokens) == packed


@given(tokens_of_blocks, st.integers(1, 9), st.integers(0, 39), st.integers(1, 2**32 - 1))
def test_a_changed_token_changes_all_later_hashes(tokens: list[int], block_tokens: int, at: int, by: int) -> None:
    if at >= len(tokens):
        return
    changed = [*tokens[:at], (tokens[at] + by) % 2**32, *tokens[at + 1 :]]
    before, after = block_hashes(ROOT, tokens, block_tokens), block_hashes(ROOT, changed, block_tokens)
    for block in range(len(before) // 32):
        equal = before[32 * block : 32 * block + 32] == after[32 * block : 32 * block + 32]
        assert equal == (block < at // block_tokens)


@given(tokens_of_blocks, st.integers(0, 3))
def test_a_chain_goes_on_from_its_last_hash(tokens: list[int], blocks: int) -> None:
    whole = block_hashes(ROOT, tokens, 4)
    head = whole[: 32 * blocks]
    if len(head) == 32 * blocks and blocks:
        assert head + block_hashes(head[-32:], tokens[4 * blocks :], 4) == whole


@given(pairs, st.randoms(use_true_random=False))
def test_the_order_of_extra_pairs_is_irrelevant(extra: list[tuple[bytes, bytes]], random: Any) -> None:
    shuffled = list(extra)
    random.shuffle(shuffled)
    assert block_hash(ROOT, [1, 2], extra) == block_hash(ROOT, [1, 2], shuffled)


@given(pairs, pairs)
def test_other_extra_pairs_give_another_hash(one: list[tuple[bytes, bytes]], two: list[tuple[bytes, bytes]]) -> None:
    assert (block_hash(ROOT, [1, 2], one) == block_hash(ROOT, [1, 2], two)) == (sorted(one) == sorted(two))


@given(st.lists(st.integers(0, 2**32 - 1), max_size=6), st.lists(st.integers(0, 2**32 - 1), max_size=6))
def test_tokens_never_pass_for_extra_pairs(one: list[int], two: list[int]) -> None:
    packed = np.asarray(two, "<u4").tobytes()
    assert block_hash(ROOT, one + two) != block_hash(ROOT, one, [(packed, b"")])


@given(st.dictionaries(texts, texts))
def test_canonical_json_reads_back_as_the_same_fields(fields: dict[str, str]) -> None:
    assert json.loads(canonical_json(fields)) == fields


@pytest.mark.parametrize("token", [-1, 2**32, 2**63, 2**70, -(2**70), 1.0, "1", None])
def test_an_id_that_is_no_32_bit_number_is_refused(token: Any) -> None:
    with pytest.raises(InvalidArgument):
        block_hashes(ROOT, [1, token], 2)


@pytest.mark.parametrize("tokens", [[[1, 2], [3, 4]], [[1], [2, 3]], np.ones((2, 2), np.int64), np.ones(4, bool), 7])
def test_tokens_that_are_no_flat_sequence_are_refused(tokens: Any) -> None:
    with pytest.raises(InvalidArgument):
        block_hashes(ROOT, tokens, 2)


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_half_of_a_surrogate_pair_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="surrogate"):
        Identity(salt=text)
    with pytest.raises(InvalidArgument, match="surrogate"):
        opaque_block_hash(ROOT, text, b"1")


@pytest.mark.parametrize("value", [None, 1, b"x", 1.5])
def test_an_identity_value_that_is_no_string_is_refused(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="string"):
        Identity(revision=value)


def test_equal_extra_pairs_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="equal"):
        block_hash(ROOT, [1], [(b"image", b"1"), (b"image", b"1")])


@pytest.mark.parametrize("root", [b"", b"x" * 31, b"x" * 33])
def test_a_root_of_another_size_is_refused(root: bytes) -> None:
    with pytest.raises(InvalidArgument, match="32 bytes"):
        block_hashes(root, [1, 2], 2)


@pytest.mark.parametrize("block_tokens", [0, -16])
def test_blocks_without_tokens_are_refused(block_tokens: int) -> None:
    with pytest.raises(InvalidArgument, match="block_tokens"):
        block_hashes(ROOT, [1, 2], block_tokens)


@pytest.mark.parametrize(
    "position",
    [
        '{"rope_type":"dynamic","factor":2}',
        '{"type":"longrope"}',
        '{"type":"su"}',
        '{"rope_scaling":{"rope_type":"LongRope"}}',
        '{"full_attention":{"rope_type":"dynamic"},"sliding_attention":{"rope_type":"default"}}',
        "dynamic ntk",
        '"longrope"',
    ],
)
def test_keys_that_depend_on_total_length_are_refused(position: str) -> None:
    with pytest.raises(InvalidArgument, match="total length"):
        Identity(position=position)


@pytest.mark.parametrize(
    "position",
    ["", "alibi", '{"rope_theta":1,"rope_type":"default"}', '{"rope_type":"yarn"}', '{"rope_type":"llama3"}', "[1]", "null", "[" * 9999],
)
def test_keys_that_depend_on_their_own_position_are_taken(position: str) -> None:
    assert Identity(position=position).position == position


@pytest.mark.parametrize("scheme", ["vllm/xxhash_cbor", "vllm/xxhash", "vllm/builtin", "builtin", "python/hash", ""])
def test_engine_hashes_with_a_random_seed_are_refused(scheme: str) -> None:
    with pytest.raises(InvalidArgument, match="process"):
        opaque_block_hash(ROOT, scheme, b"\1" * 32)


def test_an_empty_engine_hash_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="empty"):
        opaque_block_hash(ROOT, "vllm/sha256_cbor", b"")


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_the_last_token_is_always_computed(blocks: int) -> None:
    assert usable_blocks(16 * blocks - 1, 16) == blocks - 1
    assert usable_blocks(16 * blocks, 16) == blocks - 1
    assert usable_blocks(16 * blocks + 1, 16) == blocks
    assert usable_blocks(0, 16) == 0
