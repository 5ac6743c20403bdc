"""The argmax of each row, and whether its logits are finite: one pass over the logits."""

from __future__ import annotations

import torch
from torch import Tensor

from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, has_kernels, jit, launch_options, tl, triton
from cortex.neuron.kernels.native.library import native_library_or_none
from cortex.neuron.kernels.native.operations import Argmax, compute, operation

_PART = 4096


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The first of the highest logits, and whether that logit is finite; NaN counts as higher than any value.

    logits: [rows, vocab] → [rows] int64, [rows] bool
    """
    if not has_kernels(logits):
        is_native = logits.dtype == torch.float32 and native_library_or_none() is not None
        return (_native_argmax if is_native else argmax_reference)(logits)
    rows, vocab = logits.shape
    num_parts = triton.cdiv(vocab, _PART)
    device = logits.device
    highest = torch.empty((rows, num_parts), dtype=torch.float32, device=device)
    places = torch.empty((rows, num_parts), dtype=torch.int32, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    healthy = torch.empty(rows, dtype=torch.bool, device=device)
    options = launch_options(device)
    _parts_kernel[(num_parts, rows)](
        logits, highest, places, vocab, logits.stride(0), PART=_PART, num_warps=4, **options
    )
    _rows_kernel[(rows,)](
        highest, places, tokens, healthy, num_parts, BLOCK=triton.next_power_of_2(num_parts), num_warps=1, **options
    )
    return tokens, healthy


def _native_argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits.contiguous()
    rows, vocab = logits.shape
    tokens, healthy = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
    made = operation(Argmax, logits=logits, tokens=tokens, is_finite=healthy, count=vocab)
    compute(made, rows, is_small=True)
    return tokens, healthy


def argmax_reference(logits: Tensor) -> tuple[Tensor, Tensor]:
    # On a CPU, numpy's is twenty times as fast as torch's.
    tokens = torch.from_numpy(logits.float().numpy().argmax(-1)) if logits.is_cpu else logits.argmax(-1)
    return tokens, logits.gather(-1, tokens[:, None])[:, 0].isfinite()


@jit
def _parts_kernel(logits, highest, places, vocab, stride, PART: tl.constexpr, OVERLAP: tl.constexpr):
    """One program per PART tokens of a row."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * PART + tl.arange(0, PART)
    logit = tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    logit = tl.where(logit == logit, logit, float("inf"))
    best, place = tl.max(logit, 0, return_indices=True)
    where = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(highest + where, best)
    tl.store(places + where, tl.program_id(0) * PART + place)


@jit
def _rows_kernel(highest, places, tokens, healthy, num_parts, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """One program per row: the first of its parts with the highest logit."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    part = tl.arange(0, BLOCK)
    logit = tl.load(highest + row * num_parts + part, mask=part < num_parts, other=float("-inf"))
    best, first = tl.max(logit, 0, return_indices=True)
    tl.store(tokens + row, tl.load(places + row * num_parts + first).to(tl.int64))
    tl.store(healthy + row, tl.abs(best) < float("inf"))
