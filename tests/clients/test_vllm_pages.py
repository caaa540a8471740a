"""An engine's KV tensors as blocks of bytes, in every layout: what is gathered is what was there, and goes back to its own place only."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from kvstore.clients.arena import Arena
from kvstore.clients.vllm_device import DevicePages, Gpu
from kvstore.clients.vllm_pages import EnginePages, Pages
from kvstore.errors import GeometryError
from kvstore.kernels.driver import CudaError
from kvstore.testing.fake_cuda import FakeCuda

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
    return {str(layer): torch.zeros(BLOCKS, row + 24)[:, :row].view(BLOCKS, HEADS, TOKENS, ITEMS) for layer in range(LAYERS)}


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


def on_a_device(tensors: Tensors) -> DevicePages:
    """As in a GPU's memory, behind a driver that copies as late as the rules allow."""
    return DevicePages(tensors, Gpu(FakeCuda(), 0))


@pytest.mark.parametrize("of", [Pages, on_a_device])
@pytest.mark.parametrize("make", LAYOUTS)
def test_a_block_goes_out_and_comes_back_to_another_place(make: Callable[[], Tensors], of: Callable[[Tensors], EnginePages]) -> None:
    tensors = make()
    pages = of(tensors)
    for tensor in tensors.values():
        tensor.copy_(torch.rand(tensor.shape))
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    slot = np.zeros(pages.block_bytes + 100, np.uint8)
    pages.gather([1], [slot])
    pages.scatter([3], [slot])
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
    with pytest.raises(GeometryError, match="for host memory"):
        Pages({"0": torch.zeros(SHAPE, device="meta")})
    with pytest.raises(GeometryError, match="not shared yet"):
        Pages({"0": [torch.zeros(SHAPE)]})  # type: ignore[dict-item]
    with pytest.raises(GeometryError, match="different numbers of blocks"):
        Pages({"0": torch.zeros(SHAPE), "1": torch.zeros(BLOCKS + 1, 1, 1, 1)})
    with pytest.raises(GeometryError, match="no KV tensors"):
        Pages({})


@pytest.mark.parametrize("make", LAYOUTS)
def test_a_device_s_blocks_are_made_up_as_the_host_s(make: Callable[[], Tensors]) -> None:
    tensors = make()
    for tensor in tensors.values():
        tensor.copy_(torch.rand(tensor.shape))
    host, device = Pages(tensors), on_a_device(tensors)
    facts = [(each.layers, each.blocks, each.block_bytes, each.layout) for each in (host, device)]
    slots = [[np.zeros(host.block_bytes, np.uint8) for _ in range(2)] for _ in range(2)]
    host.gather([4, 0], slots[0])
    device.gather([4, 0], slots[1])
    assert facts[0] == facts[1]
    assert all(np.array_equal(one, other) for one, other in zip(*slots, strict=True))


@pytest.fixture
def arenas(tmp_path: Path) -> list[Arena]:
    made = []
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(bytes(5 * 4096))
        made.append(Arena(str(tmp_path / name), 4096, 4 * 4096))
    return made


def test_an_arena_is_pinned_once_and_the_one_before_it_let_go(arenas: list[Arena]) -> None:
    """By pages of several KV cache groups together."""
    cuda, tensors = FakeCuda(), of_one_storage()
    gpu = Gpu(cuda, 0)
    pages, others = DevicePages(tensors, gpu), DevicePages(of_two_sizes(), gpu)
    tensors["0"][2] = 7
    for arena in (arenas[0], arenas[0], arenas[1]):
        pages.write_to(arena)
        others.write_to(arena)
        pages.gather([2], [arena.writable_view(1, pages.block_bytes)])
        pages.scatter([3], [pages.source(arena, 1)])
        others.scatter([3], [others.source(arena, 2)])
        assert (tensors["0"][3] == 7).all()
        tensors["0"][3] = 0
    assert (cuda.calls["pin"], cuda.calls["unpin"]) == (2, 1)
    assert cuda.calls["stream"] == 3
    pages.close()
    others.close()
    assert cuda.leaks() == []
    assert cuda.violations == []


def test_without_pins_it_copies_and_says_that_it_is_slower(arenas: list[Arena], caplog: pytest.LogCaptureFixture) -> None:
    cuda, tensors = FakeCuda(), of_one_storage()
    cuda.fail("pin", 2)
    pages = DevicePages(tensors, Gpu(cuda, 0))
    tensors["0"][2] = 7
    pages.write_to(arenas[0])
    pages.gather([2], [arenas[0].writable_view(1, pages.block_bytes)])
    assert "not pinned" in caplog.text
    assert (arenas[0].view(1, 2) != 0).any()


@pytest.mark.parametrize("call", ["copy", "record", "wait"])
def test_a_copy_that_fails_is_an_error_once_nothing_runs_any_more(call: str, arenas: list[Arena]) -> None:
    cuda = FakeCuda()
    pages = DevicePages(of_two_sizes(), Gpu(cuda, 0))
    cuda.fail(call, 700, after=1 if call == "copy" else 0)
    with pytest.raises(CudaError):
        pages.gather([2], [arenas[0].writable_view(1, pages.block_bytes)])
    if call == "copy":
        assert cuda.in_flight() == 0
        pages.close()
        assert cuda.leaks() == []
