"""Others' decode attention on K and V of the same size, for comparison: torch's, FlashAttention's, FlashInfer's; whichever is installed.

Each has its layout of its own and may read it contiguously. Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.bench.kernel_roofline import Gpu, Shape

ROUNDS = 20  # calls that are timed: enough for the mean of a steady clock
WARM_UP = 3  # calls: before those that are timed, for what is compiled or allocated at first
USED = 0.4  # of the free memory: what K and V may take, since ours lie there too
FLASH_PAGE_TOKENS = 256  # tokens of a page: what FlashAttention's paged cache asks a multiple of
WORKSPACE_BYTES = 128 << 20  # bytes: what FlashInfer's documentation gives

Figures = dict[str, Any]


def measure_peers(shape: Shape, gpu: Gpu, free_bytes: int) -> dict[str, Figures]:
    """Seconds of one layer's decode step by each, or why there are none."""
    found: dict[str, Figures] = {}
    for name, make in PEERS.items():
        if shape.kv_bytes > USED * free_bytes:
            found[name] = {"left_out": f"{shape.kv_bytes} bytes of K and V, {free_bytes} are free"}
            continue
        try:
            seconds = _seconds(make(shape))
            found[name] = {"seconds": seconds, "of_copy": shape.kv_bytes / seconds / gpu.bytes_per_s}
        except Exception as error:  # noqa: BLE001  others' code, of any version: what it cannot do here is no fault of ours
            found[name] = {"left_out": f"{type(error).__name__}: {error}"[:300]}
    return found


def _seconds(act: Callable[[], object]) -> float:
    import torch

    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for index in range(WARM_UP + ROUNDS):
        if index == WARM_UP:
            first.record()
        act()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) / 1e3 / ROUNDS


def _tensor(*sizes: int) -> Any:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("this torch has no CUDA")
    return torch.randn(sizes, dtype=torch.bfloat16, device="cuda")


def _torch_sdpa(shape: Shape) -> Callable[[], object]:
    from torch.nn.functional import scaled_dot_product_attention

    keys, values = (_tensor(shape.batch, shape.kv_heads, shape.context, shape.head_dim) for _ in range(2))
    q = _tensor(shape.batch, shape.q_heads, 1, shape.head_dim)
    return lambda: scaled_dot_product_attention(q, keys, values, enable_gqa=shape.group > 1)


def _flash_attention(shape: Shape) -> Callable[[], object]:
    import flash_attn
    import torch

    pages = -(-shape.context // FLASH_PAGE_TOKENS)
    keys, values = (_tensor(shape.batch * pages, FLASH_PAGE_TOKENS, shape.kv_heads, shape.head_dim) for _ in range(2))
    q = _tensor(shape.batch, 1, shape.q_heads, shape.head_dim)
    lengths = torch.full((shape.batch,), shape.context, dtype=torch.int32, device="cuda")
    table = torch.randperm(shape.batch * pages, device="cuda").to(torch.int32).view(shape.batch, pages)
    return lambda: flash_attn.flash_attn_with_kvcache(q, keys, values, cache_seqlens=lengths, block_table=table, causal=True)


def _flashinfer(shape: Shape) -> Callable[[], object]:
    import flashinfer
    import torch

    pages = -(-shape.context // shape.block_tokens)
    cache = _tensor(shape.batch * pages, 2, shape.block_tokens, shape.kv_heads, shape.head_dim)
    q = _tensor(shape.batch, shape.q_heads, shape.head_dim)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=shape.group > 4)
    bounds = torch.arange(shape.batch + 1, dtype=torch.int32, device="cuda") * pages
    order = torch.randperm(shape.batch * pages, device="cuda").to(torch.int32)
    last = torch.full((shape.batch,), shape.context - (pages - 1) * shape.block_tokens, dtype=torch.int32, device="cuda")
    sizes = (shape.q_heads, shape.kv_heads, shape.head_dim, shape.block_tokens)
    wrapper.plan(bounds, order, last, *sizes, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
    return lambda: wrapper.run(q, cache)


PEERS: dict[str, Callable[[Shape], Callable[[], object]]] = {
    "torch_sdpa": _torch_sdpa,
    "flash_attention": _flash_attention,
    "flashinfer": _flashinfer,
}
