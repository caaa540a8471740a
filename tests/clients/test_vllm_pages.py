"""An engine's KV tensors as blocks of bytes, in every layout: what is gathered is what was there, and goes back to its own place only."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvstore.clients.vllm_pages import Pages
from kvstore.errors import GeometryError

LAYERS, BLOCKS, HEADS, TOKENS, ITEMS = 3, 5, 2, 8, 16
SHAPE = (BLOCKS, HEADS, TOKENS, ITEMS)
Tensors = dict[str, torch.Tensor]


def of_one_storage() -> Tensors:
    """One allocation, layer after layer, heads outside of tokens."""
    whole = torch.zeros(LAYERS, *SHAPE, dtype=torch.bfloat16)
    return {str(layer): whole[layer] for layer in range(LAYERS)}


def tokens_outside() -> Tensors:
    """Tokens outside of heads in memory, under the same shape."""
    whole = torch.zeros(LAYERS, BLOCKS, TOKENS, HEADS, ITEMS)
    return {str(layer): whole[layer].transpose(1, 2) for layer in range(LAYERS)}


def padded() -> Tensors:
    """Pages with room between them."""
    row = HEADS * TOKENS * ITEMS
    return {
        str(layer): torch.zeros(BLOCKS, row + 24)[:, :row].view(BLOCKS, HEADS, TOKENS, ITEMS) for layer in range(LAYERS)
    }


def layers_inside() -> Tensors:
    """All layers of a block together."""
    whole = torch.zeros(BLOCKS, LAYERS, *SHAPE[1:], dtype=torch.float16)
    return {str(layer): whole[:, layer] for layer in range(LAYERS)}


def of_two_sizes() -> Tensors:
    """Layers that differ."""
    return {"0": torch.zeros(SHAPE), "1": torch.zeros(BLOCKS, 1, TOKENS, 4), "2": torch.zeros(SHAPE)}


def shared() -> Tensors:
    """A layer that uses another's keys and values."""
    own = torch.zeros(SHAPE)
    return {"0": own, "1": torch.zeros(SHAPE), "2": own}


LAYOUTS = [of_one_storage, tokens_outside, padded, layers_inside, of_two_sizes, shared]


@pytest.mark.parametrize("make", LAYOUTS)
def test_a_block_goes_out_and_comes_back_to_another_place(make: Callable[[], Tensors]) -> None:
    tensors = make()
    pages = Pages(tensors)
    for tensor in tensors.values():
        tensor.copy_(torch.rand(tensor.shape))
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    slot = np.zeros(pages.block_bytes + 100, np.uint8)
    pages.gather(1, slot)
    pages.scatter(3, slot)
    distinct = {tensor.data_ptr(): tensor for tensor in tensors.values()}.values()
    assert pages.block_bytes == sum(tensor[0].numel() * tensor.element_size() for tensor in distinct)
    assert not slot[pages.block_bytes :].any()
    for name, tensor in tensors.items():
        assert torch.equal(tensor[3], before[name][1])
        assert all(torch.equal(tensor[other], before[name][other]) for other in (0, 1, 2, 4))


def test_layouts_have_names_of_their_own() -> None:
    """Two engines whose pages differ in anything do not read each other's: shape, type, order in memory."""
    assert len({Pages(make()).layout for make in (of_one_storage, tokens_outside, layers_inside, of_two_sizes)}) == 4


def test_gaps_inside_a_page_are_refused() -> None:
    whole = torch.zeros(BLOCKS, HEADS, TOKENS, 2 * ITEMS)
    with pytest.raises(GeometryError, match="gaps"):
        Pages({"0": whole[..., :ITEMS]})


def test_other_memory_and_states_are_refused() -> None:
    with pytest.raises(GeometryError, match="host memory only"):
        Pages({"0": torch.zeros(SHAPE, device="meta")})
    with pytest.raises(GeometryError, match="not shared yet"):
        Pages({"0": [torch.zeros(SHAPE)]})  # type: ignore[dict-item]
    with pytest.raises(GeometryError, match="different numbers of blocks"):
        Pages({"0": torch.zeros(SHAPE), "1": torch.zeros(BLOCKS + 1, 1, 1, 1)})
    with pytest.raises(GeometryError, match="no KV tensors"):
        Pages({})
