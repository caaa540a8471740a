"""Which device a worker computes on, whether the CUDA kernels serve its model, and the store for it."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from kvstore.clients.client import KVClient
from kvstore.clients.pools import PoolTerms
from kvstore.errors import ConfigError, GeometryError, InvalidArgument, ResourceExhausted
from kvstore.worker.gpu.device import Gpu
from kvstore.worker.gpu.kernels import variants_for
from kvstore.worker.gpu.store import HbmStore
from kvstore.worker.model import LoadedModel
from kvstore.worker.opening import NO_PORTION, Portion
from kvstore.worker.standalone import StandaloneStore

log = logging.getLogger(__name__)


def find_gpu(asked: str) -> Gpu | None:
    """The GPU for "cuda", "cuda:1" or, where there is one, "auto"; None for "cpu". Raises ConfigError where it is not there."""
    kind, _, number = asked.partition(":")
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return None
    if kind not in ("cuda", "auto") or not (number or "0").isdecimal():
        raise ConfigError(f"{asked!r} is no device; give auto, cpu, cuda, or cuda:1 for the second GPU")
    from kvstore.worker.gpu.cuda import CudaGpu

    try:
        return CudaGpu(int(number or 0))
    except ConfigError as error:
        if kind != "auto":
            raise
        log.warning("the GPU is left out: %s", error)
        return None


def require_served(loaded: LoadedModel, gpu: Gpu) -> None:
    """Have the kernels for a model ready. Raises GeometryError, InvalidArgument where they do not serve it; nothing was moved then."""
    config = loaded.model.config
    if getattr(config, "attn_logit_softcapping", None):
        raise InvalidArgument(f"model {loaded.identity.model} caps its scores, which the CUDA kernels do not; serve it with --device cpu")
    gpu.prepare(variants_for(loaded.geometry(), int(config.num_attention_heads)))


def serves(loaded: LoadedModel, gpu: Gpu, asked: str) -> bool:
    """Whether the kernels serve a model; where "auto" was asked it is said why not, else raised as by `require_served`."""
    try:
        require_served(loaded, gpu)
    except (GeometryError, InvalidArgument) as error:
        if asked != "auto":
            raise
        log.warning("the GPU is left out: %s", error)
        return False
    return True


def move(loaded: LoadedModel, gpu: Gpu) -> None:
    """Put the model's weights where it is to compute. Raises ResourceExhausted where they do not fit."""
    try:
        loaded.model.to(gpu.device)  # type: ignore[arg-type]
    except torch.OutOfMemoryError as error:
        raise ResourceExhausted(f"the GPU has too little memory for the model's weights: {error}; use a smaller one, or --hbm") from error


def open_in_pool(loaded: LoadedModel, gpu: Gpu, address: str | None, name: str = "", portion: Portion = NO_PORTION) -> HbmStore:
    """The daemon's pool on a GPU, its host memory below it; the portion counts in each of the two.

    Raises Unavailable where no daemon serves, ConfigError where it has no pool there, InvalidArgument where tails are asked for.
    """
    if portion.tails:
        raise InvalidArgument("there are no partial tails in GPU memory; leave --tails out, or use --device cpu")
    terms = PoolTerms(gpu.driver.uuid(gpu.number), portion.guarantee_bytes, portion.limit_bytes)
    with KVClient(address, name=name, guarantee_bytes=portion.guarantee_bytes, limit_bytes=portion.limit_bytes) as client:
        session = client.open_blocks(loaded.identity, loaded.geometry(portion.block_tokens), pools=[terms])
    try:
        return HbmStore(session, gpu)
    except BaseException:
        session.close()
        raise


def open_alone(loaded: LoadedModel, gpu: Gpu, size_bytes: int) -> StandaloneStore:
    """A store of this process alone in so much of a GPU's memory. Raises ConfigError where it has less, or not one block fits."""

    def memory(count: int) -> Tensor:
        try:
            return torch.zeros(count, dtype=torch.uint8, device=gpu.device)
        except torch.OutOfMemoryError as error:
            raise ConfigError(f"the GPU has no {count} bytes free: {error}; give --standalone less") from error

    return StandaloneStore(loaded.identity, loaded.geometry(), size_bytes, memory=memory)
