"""Matrices that GPTQ quantised column by column in another order than theirs (`desc_act`). Needs no torch.

A tensor of the file has the group of each column. In a GPU's memory such columns are sorted by group, which takes their
inputs in the same order. The inputs of a down projection are the outputs of gate and up: their rows are read in that
order instead, and the inputs have it already. Each expert has an order for gate and up. The model computes the same.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Final

from cortex.neuron.weights.stored import ScaleTensors, StoredTensor

_TYPES: Final = {"I32": "i", "I64": "q"}
_FORMATS: Final = {4: "INT4", 8: "INT8"}
_MAX_COLUMNS: Final = 1 << 16
"""Kernels have the columns of an order in 16 bits."""
_BLOCKS: Final = {"down_proj": ("gate_proj", "up_proj"), "w2": ("w1", "w3")}
"""The last matrix of a feed-forward block, and those before it."""
_FIRST: Final = {member for before in _BLOCKS.values() for member in before}
_BY_INPUTS: Final = ("gptq", "gptq_v2")


def is_in_order(index: StoredTensor, group: int) -> bool:
    """Whether the columns are in the order of their groups. `index`: the group of each column. Raises CheckpointError,
    also where `sorted_by_group` does."""
    return _read(index) == _in_order(index.format, index.num_elements, group)


def sorted_by_group(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint with the matrices in another order as memory can hold them, sorted by group."""
    found = dict(tensors)
    members: dict[str, set[str]] = defaultdict(set)
    for name in tensors:
        prefix, member = _parts(name)
        members[prefix].add(member)
    orders: dict[str, str | None] = {}
    for name, tensor in tensors.items():
        if tensor.format != "INT_ORDERED":
            continue
        prefix, member = _parts(name)
        order = _order(tensor)
        before = [f"{prefix}.{each}.weight" for each in _BLOCKS.get(member, ()) if each in members[prefix]]
        # Any other tensor of the block, as a norm, would need the order as well, and so would a bias.
        is_block = len(before) == len(members[prefix]) - 1 and not any(
            f"{prefix}.{each}" in members for each in members[prefix] - {member}
        )
        if order and before and is_block and all(_takes_row_order(found[each], tensor) for each in before):
            found[name] = _with(found[name], is_sorted=True)
            for each in before:
                found[each] = _with(found[each], row_order=_scales(tensor).ordered)
        elif not _stack(prefix) or member in _FIRST:
            orders[name] = order
    unsorted = _unsorted_stacks(orders, members)
    for name, order in orders.items():
        if order and _stack(name) not in unsorted:
            found[name] = _with(found[name], order=order)
    return found


def _unsorted_stacks(orders: Mapping[str, str | None], members: Mapping[str, set[str]]) -> set[str]:
    """Experts that stay as they are, because gate and up of one differ: all are one matrix, with one order for each."""
    unsorted = set()
    for prefix in {_parts(name)[0] for name in orders if _stack(name)}:
        own = {orders.get(f"{prefix}.{member}.weight") for member in _FIRST & members[prefix]}
        if len(own) > 1 or None in own:
            unsorted.add(_stack(prefix))
    return unsorted


def _stack(name: str) -> str:
    """The experts to which a matrix or its block belongs; empty: it is in none."""
    return name.rpartition(".experts.")[0]


def _parts(name: str) -> tuple[str, str]:
    """The block of a matrix, and its name there."""
    prefix, _, member = name.removesuffix(".weight").rpartition(".")
    return prefix, member


def _with(
    tensor: StoredTensor, *, order: str | None = None, is_sorted: bool = False, row_order: StoredTensor | None = None
) -> StoredTensor:
    scales = _scales(tensor)
    if row_order is not None:
        return replace(tensor, scales=replace(scales, row_order=row_order))
    return replace(tensor, format=_FORMATS[scales.bits], scales=replace(scales, order=order, is_sorted=is_sorted))


def _scales(tensor: StoredTensor) -> ScaleTensors:
    assert tensor.scales is not None
    return tensor.scales


def _takes_row_order(tensor: StoredTensor, following: StoredTensor) -> bool:
    """Whether its rows, which are the columns of `following`, can be read in another order."""
    is_known = tensor.scales is not None and tensor.scales.kind in _BY_INPUTS
    return is_known and tensor.num_rows == following.shape[1]


def _order(tensor: StoredTensor) -> str | None:
    """Names the order of the columns by group; None: the groups have not all as many columns."""
    index = _scales(tensor).ordered
    assert index is not None
    if index.num_elements > _MAX_COLUMNS:
        return None
    return _order_of(_read(index), index.format, index.num_elements, _scales(tensor).columns)


@lru_cache(maxsize=16)
def _order_of(groups: bytes, kind: str, columns: int, group: int) -> str | None:
    if dict(Counter(array(_TYPES[kind], groups))) != dict.fromkeys(range(columns // group), group):
        return None
    return hashlib.blake2b(groups, digest_size=16).hexdigest()


def _read(index: StoredTensor) -> bytes:
    raw = bytearray(index.num_bytes)
    index.file.read_into(memoryview(raw), index.offset)
    return bytes(raw)


@lru_cache(maxsize=16)
def _in_order(kind: str, columns: int, group: int) -> bytes:
    return array(_TYPES[kind], (column // group for column in range(columns))).tobytes()
