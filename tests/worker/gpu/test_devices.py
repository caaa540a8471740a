"""Every tensor of a step is on the GPU: torch's "meta" device stands for it, and no operation may mix its tensors with the host's."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvstore.worker import attention
from kvstore.worker.forward import forward
from kvstore.worker.gpu import kernels
from kvstore.worker.gpu.device import Gpu, Views
from kvstore.worker.model import LoadedModel
from kvstore.worker.paged import PagedCache
from kvstore.worker.standalone import StandaloneStore
from tests.worker.gpu.models import load
from tests.worker.steps import start
from tests.worker.stores import BLOCK_TOKENS, prompt

THERE = torch.device("meta")
COPIES = ("_to_copy", "copy_")  # torch's names for what may take a tensor from one device to another
ADDRESS = 1 << 20  # of every tensor: none has memory


class Imagined:
    """A GPU whose tensors have a place and a shape, and no numbers."""

    number, device, backend, views = 0, THERE, None, Views()

    def upload(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(THERE)

    def settle(self) -> None:
        """Nothing is queued."""

    def bring(self, tensor: Tensor) -> Tensor:
        assert tensor.device == THERE
        return torch.zeros(tensor.shape)


@pytest.fixture(params=["gpu-llama", "gpu-mixed", "gpu-sinks"])
def imagined(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoadedModel]:
    """A model there, whose kernels only look at where their arrays are."""
    real = load(request.param)
    monkeypatch.setattr("transformers.masking_utils.is_tracing", lambda _tensor=None: True)  # else it looks at positions, which have none
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda _self: ADDRESS)
    monkeypatch.setattr(kernels, "describe", lambda tensor, _dtype="": tensor)
    monkeypatch.setattr(kernels, "write_kv", lambda _backend, *arrays, layer: there(*arrays))
    monkeypatch.setattr(kernels, "paged_decode", lambda _backend, *arrays, sink_logits=None, **_: there(*arrays, sink_logits))
    # Experts have kernels for some types and devices only; here it is the attention that matters.
    monkeypatch.setattr("transformers.models.gpt_oss.modeling_gpt_oss.GptOssMLP.forward", lambda _self, hidden: (hidden, None))
    model = copy.deepcopy(real.model).to(THERE)  # type: ignore[arg-type]
    with cast(Any, OneDevice)():
        yield LoadedModel(model, None, real.identity, frozenset())


class OneDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises where an operation is given tensors of both devices: numbers apart, which travel with a launch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [each for each in tree_leaves((args, kwargs or {})) if isinstance(each, Tensor) and each.dim()]
        if len({each.device for each in tensors}) > 1 and func.name().split("::")[1].split(".")[0] not in COPIES:
            raise AssertionError(f"{func.name()} with tensors on {[str(each.device) for each in tensors]}")
        return func(*args, **(kwargs or {}))


def there(*arrays: Any) -> None:
    """Each tensor is on the GPU."""
    assert [array.device for array in arrays if isinstance(array, Tensor)] == [THERE] * sum(isinstance(array, Tensor) for array in arrays)


def test_prompts_chunks_rows_and_forks_stay_on_the_gpu(imagined: LoadedModel) -> None:
    geometry = imagined.geometry(BLOCK_TOKENS)
    store = StandaloneStore(
        imagined.identity, geometry, 64 * geometry.slot_bytes, memory=lambda size: torch.zeros(size, dtype=torch.uint8, device=THERE)
    )
    cache = PagedCache(store, gpu=cast(Gpu, Imagined()))
    cast(Any, cache.runner).graphs.why_off = "nothing can be recorded"
    one, two = start(imagined, cache, prompt(30)), start(imagined, cache, prompt(25, seed=1))
    spent = SimpleNamespace(gather_s=0.0, write_s=0.0, compute_s=0.0)

    def step(*parts: Any) -> Tensor:
        for sequence, count in parts:
            sequence.ensure(count)
        with torch.inference_mode(), attention.paged(imagined.model):
            logits = forward(imagined, cache, parts, spent)
        for sequence, count in parts:
            sequence.advance(count)
        return logits

    step((one, 20))
    step((one, 9), (two, 24))
    assert step((one, 1), (two, 1)).shape == (2, 211)
    other = one.fork()
    for sequence in (one, other, two):
        sequence.append(5)
    step((one, 1), (other, 1))
    other.append(6)
    assert step((two, 1), (other, 1)).device == torch.device("cpu")
    cache.close()


def test_an_index_left_on_the_host_is_noticed(imagined: LoadedModel) -> None:
    """That mixing is refused at all."""
    rows = torch.zeros((4, 8), device=THERE)
    with pytest.raises(AssertionError, match="index_select with tensors on"):
        rows.index_select(0, torch.tensor([1, 2]))
