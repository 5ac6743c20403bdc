"""Whole new prompts through the attention of torch's library (cuDNN), where that is faster than our own kernel.

The library builds a plan for every length it meets, which takes it as long as a prompt takes. So prompts run at one of
few lengths, the next one up, and only at lengths whose plan has been built while there was nothing else to do
(`prepare`). Plans belong to the thread that built them.

What lies behind a prompt's end is harmless: no token looks that far ahead.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cortex.neuron.kernels.attention.rules import AttentionRules
from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, launch_options, tl, triton

SHORTEST = 1024
"""Below, attention is a small part of a step and the difference between the two is smaller still."""
STEPS_PER_DOUBLING = 8
"""Lengths between one power of two and the next: at most an eighth is computed in vain."""
GATHERED_TOKENS = 8
_REFUSAL = "No available kernel"
"""How torch says that the one library it was told to use does not serve such tensors."""


class Unserved(Exception):
    """The library has no attention for this geometry."""


class Geometry(NamedTuple):
    """What a plan depends on, beside the length."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    dim: int


class _Plans(threading.local):
    def __init__(self) -> None:
        self.ready: set[tuple[Geometry, int]] = set()


_plans = _Plans()


def is_faster_on(device: torch.device) -> bool:
    """Measured on Hopper, where the library uses what our kernel cannot; elsewhere it stays with ours."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def planned_length(count: int) -> int:
    """The length that a prompt of `count` tokens runs at."""
    step = max(SHORTEST, 1 << (count - 1).bit_length() - 1) // STEPS_PER_DOUBLING
    return -(-count // step) * step


def planned_lengths(longest: int) -> Iterator[int]:
    """All of them, up to the one that `longest` tokens run at."""
    length = SHORTEST
    while length <= planned_length(longest):
        yield length
        length = planned_length(length + 1)


def prepare(geometry: Geometry, scale: float, length: int) -> None:
    """Builds the plan for a length. Raises Unserved, and what torch raises when a device is out of memory or broken."""
    device, dtype, heads, kv_heads, dim = geometry
    q, k, v = (torch.zeros(length, count, dim, dtype=dtype, device=device) for count in (heads, kv_heads, kv_heads))
    try:
        _attend(q, k, v, scale)
    except RuntimeError as error:
        if _REFUSAL in str(error):
            raise Unserved(f"no library attention for {heads} heads over {kv_heads} of {dim} in {dtype}") from error
        raise
    _plans.ready.add((geometry, length))


def takes(q: Tensor, kv_heads: int, rules: AttentionRules, batch: Batch) -> bool:
    """Whether the prefill rows of this step can go through `prompt_attention`. q: [tokens, heads, dim]"""
    geometry = Geometry(q.device, q.dtype, q.shape[1], kv_heads, q.shape[2])
    return rules.window is None and all(
        row.start == 0 and row.count >= SHORTEST and (geometry, planned_length(row.count)) in _plans.ready
        for row in batch.prefills
    )


def spare_tokens(batch: Batch) -> int:
    """Rows that `prompt_attention` wants behind those of q."""
    return max(planned_length(row.count) + row.offset for row in batch.prefills) - len(batch.positions)


def prompt_attention(
    q: Tensor, rules: AttentionRules, batch: Batch, key_pages: Tensor, value_pages: Tensor
) -> list[Tensor]:
    """q: the prefill rows' tokens [tokens, heads, dim], rotated, and `spare_tokens` rows of any content behind them;
    their KV is in the pages → for each prefill row [tokens, heads, dim]"""
    parts = []
    for row in batch.prefills:
        offset = row.offset - batch.num_decodes
        length = planned_length(row.count)
        keys, values = gather(batch.page_table[row.row], row.count, length, key_pages, value_pages)
        parts.append(_attend(q[offset : offset + length], keys, values, rules.scale)[: row.count])
    return parts


def gather(table: Tensor, count: int, length: int, key_pages: Tensor, value_pages: Tensor) -> tuple[Tensor, Tensor]:
    """The first `count` positions' keys and values of the row whose pages `table` lists, and zeros up to `length`."""
    _, page_tokens, kv_heads, dim = key_pages.shape
    keys, values = torch.empty((2, length, kv_heads, dim), dtype=key_pages.dtype, device=key_pages.device)
    size = kv_heads * dim
    _gather_kernel[(triton.cdiv(length, GATHERED_TOKENS),)](
        table,
        key_pages,
        value_pages,
        keys,
        values,
        count,
        length,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        PAGE=page_tokens,
        TOKENS=GATHERED_TOKENS,
        num_warps=8,
        **launch_options(table.device),
    )
    return keys, values


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q: [length, heads, dim], k and v: [length, kv heads, dim] → [length, heads, dim], causally"""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    library: AbstractContextManager[None] = sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if q.is_cuda else nullcontext()
    with library:
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return mixed[0].transpose(0, 1)


@jit(do_not_specialize=["count", "length"], do_not_specialize_on_alignment=["table"])
def _gather_kernel(
    table,
    key_pages,
    value_pages,
    keys,
    values,
    count,
    length,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per TOKENS positions."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    column = tl.arange(0, BLOCK)[None, :]
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None]
    page = tl.load(table + token // PAGE, mask=token < count, other=0).to(tl.int64)
    source = (page * PAGE + token % PAGE) * SIZE + column
    target = token.to(tl.int64) * SIZE + column
    there = (token < count) & (column < SIZE)
    inside = (token < length) & (column < SIZE)
    tl.store(keys + target, tl.load(key_pages + source, mask=there, other=0.0), mask=inside)
    tl.store(values + target, tl.load(value_pages + source, mask=there, other=0.0), mask=inside)
