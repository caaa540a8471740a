"""What the vLLM connector makes of a request and of its settings, without the engine."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from kvstore import hashing
from kvstore.clients.vllm_requests import Tracked, multimodal_extras
from kvstore.clients.vllm_settings import Settings
from kvstore.errors import ConfigError
from kvstore.hashing import Identity, fingerprint

BLOCK_TOKENS = 16
ROOT = fingerprint(Identity(model="tests"))


@dataclass
class Place:
    offset: int
    length: int


@dataclass
class Feature:
    identifier: str
    mm_position: Place


@dataclass
class Request:
    """As vLLM's."""

    all_token_ids: list[int]
    mm_features: list[Feature] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def tracked(request: Any) -> Tracked:
    return Tracked(request, ROOT, "", BLOCK_TOKENS)


def test_hashes_grow_with_the_request_as_if_made_at_once() -> None:
    request = Request(list(range(40)))
    record = tracked(request)
    record.hashes_of(1)
    request.all_token_ids.extend(range(40, 100))
    assert record.hashes_of(6) == hashing.block_hashes(ROOT, request.all_token_ids, BLOCK_TOKENS)
    assert record.parent_of(0) == ROOT
    assert record.parent_of(2) == record.hashes_of(2)[32:]


def test_an_image_is_in_the_hash_of_every_block_that_it_touches() -> None:
    """Case 15: another image, or the same one elsewhere in the block, is another block; a block without one is not."""
    text = [7] * 100
    plain = tracked(Request(text)).hashes_of(6)
    one = tracked(Request(text, [Feature("a", Place(20, 20))])).hashes_of(6)
    two = tracked(Request(text, [Feature("b", Place(20, 20))])).hashes_of(6)
    moved = tracked(Request(text, [Feature("a", Place(21, 20))])).hashes_of(6)
    assert plain[:32] == one[:32] == two[:32] == moved[:32]
    assert len({each[32:64] for each in (plain, one, two, moved)}) == 4
    assert set(multimodal_extras([Feature("a", Place(20, 20))], 0, 6, BLOCK_TOKENS)) == {1, 2}
    assert set(multimodal_extras([Feature("a", Place(20, 20))], 2, 6, BLOCK_TOKENS)) == {0}


def test_hashes_with_an_image_do_not_depend_on_when_they_are_made() -> None:
    request = Request([7] * 100, [Feature("a", Place(10, 60)), Feature("b", Place(70, 9))])
    grown = tracked(request)
    for blocks in range(7):
        grown.hashes_of(blocks)
    assert grown.hashes == tracked(request).hashes_of(6)


@pytest.mark.parametrize(
    ("computed", "in_flight", "blocks"), [(0, 0, 0), (15, 0, 0), (16, 0, 1), (48, 0, 3), (48, 1, 2), (48, 48, 0), (64, 0, 3), (64, 20, 2)]
)
def test_only_what_is_known_counts_as_computed(computed: int, in_flight: int, blocks: int) -> None:
    """Not what steps under way compute, and not the last token, which may be only just sampled."""
    request = Request(list(range(64)), num_computed_tokens=computed, num_in_flight_tokens=in_flight)
    assert tracked(request).computed_blocks() == blocks


@pytest.mark.parametrize(("count", "blocks"), [(1, 0), (16, 0), (17, 1), (32, 1), (33, 2)])
def test_the_last_token_is_always_computed(count: int, blocks: int) -> None:
    assert tracked(Request(list(range(count)))).usable_blocks() == blocks


def test_settings_are_checked_by_name_and_kind() -> None:
    assert Settings.of({}) == Settings()
    assert Settings.of({"address": "/run/kv.sock", "acquire_timeout_s": 1}).acquire_timeout_s == 1.0
    for wrong in ({"adress": "x"}, {"address": 5}, {"acquire_timeout_s": -1}, {"acquire_timeout_s": float("nan")}, {"min_blocks": 1.5}):
        with pytest.raises(ConfigError, match="kv_connector_extra_config"):
            Settings.of(wrong)
