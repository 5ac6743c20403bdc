"""Attention of whole new prompts through cuDNN, where it is faster than our own kernel.

cuDNN builds a plan for every new length, which takes as long as computing a prompt. So prompts are padded to one of a
few lengths, and only lengths are used whose plan was built while the device was idle (`prepare`). Plans belong to the
thread that built them.

The padding after a prompt does not affect the result: attention is causal.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from cortex.neuron.kernels.attention.rules import AttentionRules
from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, launch_options, tl, triton
from cortex.neuron.private_api.torch import cudnn_attention, has_cudnn_attention

SHORTEST = 1024
"""Shorter prompts use our own kernel: attention is a small part of their step."""
STEPS_PER_DOUBLING = 8
"""Lengths between one power of two and the next: padding adds at most an eighth."""
GATHERED_TOKENS = 8


class Unserved(Exception):
    """cuDNN has no attention for this geometry."""


class Geometry(NamedTuple):
    """What a plan depends on besides the length."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    dim: int


class Plans(threading.local):
    """The plans that this thread has built."""

    def __init__(self) -> None:
        self.ready: set[tuple[Geometry, int]] = set()


plans = Plans()


def is_faster_on(device: torch.device) -> bool:
    """Measured on Hopper, where cuDNN uses instructions that Triton does not; elsewhere our own kernel is used."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def planned_length(count: int) -> int:
    """The length that a prompt of `count` tokens is padded to."""
    step = max(SHORTEST, 1 << max(0, (count - 1).bit_length() - 1)) // STEPS_PER_DOUBLING
    return -(-count // step) * step


def planned_lengths(longest: int) -> Iterator[int]:
    """All lengths, up to the one that `longest` tokens are padded to."""
    length = SHORTEST
    while length <= planned_length(longest):
        yield length
        length = planned_length(length + 1)


def prepare(geometry: Geometry, scale: float, length: int) -> None:
    """Builds the plan for a length. Raises Unserved, or torch's error when the device is out of memory or faulty."""
    device, dtype, heads, kv_heads, dim = geometry
    q, k, v = (torch.zeros(length, count, dim, dtype=dtype, device=device) for count in (heads, kv_heads, kv_heads))
    by_head = _by_head(q, k, v)
    if q.is_cuda and not can_use_cudnn_attention(SDPAParams(*by_head, None, 0.0, True, True)):
        raise Unserved(f"cuDNN has no attention for {heads} heads over {kv_heads} of {dim} in {dtype}")
    if not has_cudnn_attention(q.device, dtype):
        raise Unserved("cuDNN's attention cannot be used with this version of torch")
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if q.is_cuda else nullcontext():
        _by_torch(*by_head, scale)
    plans.ready.add((geometry._replace(device=q.device), length))  # with its number, as tensors name it


def takes(q: Tensor, kv_heads: int, rules: AttentionRules, batch: Batch) -> bool:
    """Whether `prompt_attention` can compute the prefill rows of this step. q: [tokens, heads, dim]"""
    geometry = Geometry(q.device, q.dtype, q.shape[1], kv_heads, q.shape[2])
    return (
        rules.window is None
        and (batch.reach is None or not rules.whole_pictures)
        and rules.sinks is None
        and rules.softcap is None
        and all(
            row.start == 0 and row.count >= SHORTEST and (geometry, planned_length(row.count)) in plans.ready
            for row in batch.prefills
        )
    )


def spare_tokens(batch: Batch) -> int:
    """The padding rows that `prompt_attention` needs after those of q."""
    return max(planned_length(row.count) + row.offset for row in batch.prefills) - len(batch.positions)


def prompt_attention(
    q: Tensor, rules: AttentionRules, batch: Batch, key_pages: Tensor, value_pages: Tensor
) -> list[Tensor]:
    """q: the prefill tokens [tokens, heads, dim], rotated, then `spare_tokens` rows of any content. Their KV
    is in the pages. → [tokens, heads, dim] for each prefill row"""
    parts = []
    for row in batch.prefills:
        offset = row.offset - batch.num_decodes
        length = planned_length(row.count)
        keys, values = gather(batch.page_table[row.row], row.count, length, key_pages, value_pages, q.dtype)
        parts.append(_attend(q[offset : offset + length], keys, values, rules.scale)[: row.count])
    return parts


def gather(
    table: Tensor, count: int, length: int, key_pages: Tensor, value_pages: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values of the first `count` positions in the pages that `table` lists, then zeros up to `length`."""
    _, page_tokens, kv_heads, dim = key_pages.shape
    keys, values = torch.empty((2, length, kv_heads, dim), dtype=dtype, device=key_pages.device)
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
    """q: [length, heads, dim], k and v: [length, kv heads, dim] → [length, heads, dim], causal

    On a GPU for a geometry that `prepare` found served: choosing the backend again would take longer than the launch.
    """
    q, k, v = _by_head(q, k, v)
    mixed = (cudnn_attention if q.is_cuda else _by_torch)(q, k, v, scale)
    return mixed[0].transpose(0, 1)


def _by_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[length, heads, dim] → [1, heads, length, dim]"""
    return q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]


def _by_torch(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


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
    key = tl.load(key_pages + source, mask=there, other=0.0)
    tl.store(keys + target, key.to(keys.dtype.element_ty), mask=inside)
    value = tl.load(value_pages + source, mask=there, other=0.0)
    tl.store(values + target, value.to(values.dtype.element_ty), mask=inside)
