"""Recurrent layers in GGUF (gated delta nets, short convolutions, Mamba-2): their tensors, as the hub has them.

Converters rename and reshape tensors, and some change the order of the value heads of gated delta nets: the hub keeps
the value heads of a key head together, the file has the first value head of every key head, then the second of every
key head, and so on. Rows are reordered by reading them in another order; columns, in the output projection, after
decoding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from cortex.neuron.weights.delta_heads import DeltaHeads, Runs, check_rows, joint_gates, joint_inputs, misshapen
from cortex.neuron.weights.errors import Malformed, Unsupported
from cortex.neuron.weights.stored import Adjustment, Order, StoredTensor

_GROUP: Final = 32
"""Columns that a quantised matrix keeps together in memory."""


def delta_tensors(part: str, stored: StoredTensor, heads: DeltaHeads) -> Mapping[str, StoredTensor] | None:
    """The tensors of the hub that one tensor of the file holds, by their names in the layer; None: another tensor.

    `part`: the tensor's name in the layer, `"ssm_a"`. Raises CheckpointError for a shape that does not fit.
    """
    build = _DELTA_TENSORS.get(part)
    return None if build is None else {f"linear_attn.{name}": made for name, made in build(stored, heads).items()}


def _channels(stored: StoredTensor, heads: DeltaHeads) -> dict[str, StoredTensor]:
    check_rows(stored, heads.channels)
    return {"in_proj_qkv.weight": _rows(stored, heads.channel_runs())}


def _gate(stored: StoredTensor, heads: DeltaHeads) -> dict[str, StoredTensor]:
    check_rows(stored, heads.value_size)
    return {"in_proj_z.weight": _rows(stored, heads.value_runs(heads.value_dim))}


def _per_head(name: str, adjustment: Adjustment | None = None) -> _Build:
    def build(stored: StoredTensor, heads: DeltaHeads) -> dict[str, StoredTensor]:
        check_rows(stored, heads.value_heads)
        return {name: _rows(replace(stored, adjustment=adjustment), heads.value_runs(1))}

    return build


def _delta_convolution(stored: StoredTensor, heads: DeltaHeads) -> dict[str, StoredTensor]:
    if len(stored.shape) == 2:
        stored = replace(stored, shape=(stored.shape[0], 1, stored.shape[1]))
    check_rows(stored, heads.channels)
    return {"conv1d.weight": _rows(stored, heads.channel_runs())}


def _norm(stored: StoredTensor, heads: DeltaHeads) -> dict[str, StoredTensor]:
    check_rows(stored, heads.value_dim)
    return {"norm.weight": stored}


def _output(stored: StoredTensor, heads: DeltaHeads) -> dict[str, StoredTensor]:
    if len(stored.shape) != 2 or stored.shape[1] != heads.value_size:
        raise misshapen(stored, f"{heads.value_size} columns")
    order = Order(heads.value_size, _merged(heads.value_runs(heads.value_dim)))
    if len(order.runs) == 1:
        return {"out_proj.weight": stored}
    if stored.is_blocked and not order.keeps_groups(_GROUP):
        raise Unsupported(
            f"{stored.file.path}: {stored.name} in {stored.format} has heads of {heads.value_dim} columns, which are "
            f"not whole groups of {_GROUP}; use a safetensors model"
        )
    return {"out_proj.weight": replace(stored, columns=order)}


_Build = Callable[[StoredTensor, DeltaHeads], dict[str, StoredTensor]]
_DELTA_TENSORS: Final[Mapping[str, _Build]] = {
    "attn_qkv.weight": _channels,
    "attn_gate.weight": _gate,
    "ssm_in.weight": joint_inputs,
    "ssm_ba.weight": joint_gates,
    "ssm_beta.weight": _per_head("in_proj_b.weight"),
    "ssm_alpha.weight": _per_head("in_proj_a.weight"),
    "ssm_a": _per_head("A_log", Adjustment.NEGATIVE_EXPONENTIAL),
    "ssm_dt.bias": _per_head("dt_bias"),
    "ssm_conv1d.weight": _delta_convolution,
    "ssm_norm.weight": _norm,
    "ssm_out.weight": _output,
}


def _rows(stored: StoredTensor, runs: Runs) -> StoredTensor:
    """The tensor with all of its rows in this order."""
    runs = _merged(runs)
    return stored if len(runs) == 1 else stored.with_rows(runs)


def _merged(runs: Runs) -> Runs:
    merged: list[range] = []
    for run in runs:
        if merged and merged[-1].stop == run.start:
            merged[-1] = range(merged[-1].start, run.stop)
        else:
            merged.append(run)
    return tuple(merged)


def recurrent_tensor(mixer: str, part: str, stored: StoredTensor) -> tuple[str, StoredTensor] | None:
    """The tensor's name in the hub's layer, and the tensor with the hub's shape; None: another tensor.

    `part`: its name in the layer, `"ssm_a"`. Raises CheckpointError for a shape that cannot be.
    """
    found = _TENSORS.get(mixer, {}).get(part)
    if found is None:
        return None
    name, arranged = found
    return name, arranged(stored)


def _as_it_is(stored: StoredTensor) -> StoredTensor:
    return stored


def _flat(stored: StoredTensor) -> StoredTensor:
    return replace(stored, shape=(math.prod(stored.shape),))


def _logarithms(stored: StoredTensor) -> StoredTensor:
    return replace(_flat(stored), adjustment=Adjustment.NEGATIVE_EXPONENTIAL)


def _convolution(stored: StoredTensor) -> StoredTensor:
    if len(stored.shape) != 2:
        raise Malformed(f"{stored.file.path}: {stored.name} has the shape {stored.shape}; convert the model again")
    return replace(stored, shape=(stored.shape[0], 1, stored.shape[1]))


_Arranged = Callable[[StoredTensor], StoredTensor]
_SHORT_CONVOLUTION: Final[Mapping[str, tuple[str, _Arranged]]] = {
    "shortconv.in_proj.weight": ("conv.in_proj.weight", _as_it_is),
    "shortconv.conv.weight": ("conv.conv.weight", _convolution),
    "shortconv.out_proj.weight": ("conv.out_proj.weight", _as_it_is),
}
_MAMBA: Final[Mapping[str, tuple[str, _Arranged]]] = {
    "ssm_in.weight": ("mamba.in_proj.weight", _as_it_is),
    "ssm_conv1d.weight": ("mamba.conv1d.weight", _convolution),
    "ssm_conv1d.bias": ("mamba.conv1d.bias", _as_it_is),
    "ssm_a": ("mamba.A_log", _logarithms),
    "ssm_d": ("mamba.D", _flat),
    "ssm_dt.bias": ("mamba.dt_bias", _as_it_is),
    "ssm_norm.weight": ("mamba.norm.weight", _flat),
    "ssm_out.weight": ("mamba.out_proj.weight", _as_it_is),
}
_TENSORS: Final[Mapping[str, Mapping[str, tuple[str, _Arranged]]]] = {
    "mamba": _MAMBA,
    "short_convolution": _SHORT_CONVOLUTION,
}
