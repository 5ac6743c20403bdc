"""Decoding of stored bytes into tensors, on the device that holds the bytes."""

from __future__ import annotations

import torch

from cortex.neuron.weights.errors import Malformed, Unsupported
from cortex.neuron.weights.gguf import quants
from cortex.neuron.weights.safetensors import codes
from cortex.neuron.weights.stored import GROUPED, Adjustment, StoredTensor

DENSE: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

# Quantised tensors are decoded in runs of about this many stored bytes, so that intermediates fit the CPU cache.
_RUN_BYTES = 256 << 10


def mapped_bytes(stored: StoredTensor, start_group: int = 0, num_groups: int | None = None) -> torch.Tensor:
    """The bytes of groups (default: all from `start_group`) as uint8: a view of the mapped file where they are
    contiguous there, else a copy."""
    if num_groups is None:
        num_groups = stored.num_groups - start_group
    if num_groups * stored.group_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    parts = [
        torch.frombuffer(stored.file.buffer, dtype=torch.uint8, count=num_bytes, offset=offset)
        for offset, num_bytes in stored.spans(start_group, num_groups)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def decode(stored: StoredTensor, raw: torch.Tensor, start_group: int = 0) -> torch.Tensor:
    """Decode whole groups of `stored`, from `start_group` on, into rows.

    `raw` holds their bytes, flat, on any device. Dense formats keep their dtype and share memory with `raw` if it is
    aligned. Quantised formats become float32.
    """
    dtype = DENSE.get(stored.format)
    if not stored.num_elements:
        return torch.empty(stored.shape, dtype=dtype or torch.float32, device=raw.device)
    if stored.scales is not None:
        values = codes.values_of(stored, stored.scales, raw, start_group * stored.group_rows)
        return _separate_halves(values, stored) if stored.interleaved_rows else values
    if dtype is not None:
        if raw.data_ptr() % dtype.itemsize:
            raw = raw.clone()
        values = raw.view(dtype)
    else:
        values = _dequantise(stored, raw)
    if stored.is_transposed:
        values = values.view(*stored.row_shape, -1).t()
    else:
        values = values.view(-1, *stored.row_shape) if stored.shape else values.view(())
    if stored.interleaved_rows:
        values = _separate_halves(values, stored)
    if stored.columns is not None:
        values = torch.cat([values[:, run.start : run.stop] for run in stored.columns.runs], dim=1)
    return values if stored.adjustment is None else _unadjusted(stored, values)


def has_groups(stored: StoredTensor) -> bool:
    """Whether `decode_groups` decodes it: codes with a scale for each group of columns."""
    return stored.format in quants.QUANTISATIONS or stored.format in GROUPED


def decode_groups(stored: StoredTensor, raw: torch.Tensor, start_group: int = 0) -> quants.Groups:
    """Decode whole groups of rows of a matrix, from `start_group` on, into codes, scales and minimums.

    Each is [rows, groups per row, ...], with columns sorted by group (`column_order`). Raises Unsupported if the format
    is not quantised.
    """
    if stored.scales is not None and has_groups(stored):
        groups = codes.groups_of(stored, stored.scales, raw, start_group * stored.group_rows)
        if not stored.interleaved_rows:
            return groups
        return quants.Groups(*(_separate_halves(part, stored) for part in (groups.q, groups.scale, groups.minimum)))
    quantisation = quants.QUANTISATIONS.get(stored.format)
    if quantisation is None:
        raise Unsupported(f"{stored.file.path}: weights in {stored.format} are dense, not quantised in groups")
    groups = quantisation.groups(raw.view(-1, quantisation.block_bytes))
    size = groups.q.shape[-1]
    row_groups = stored.row_shape[0] // size
    q, scale, minimum = (part.view(-1, row_groups, part.shape[-1]) for part in (groups.q, groups.scale, groups.minimum))
    if stored.interleaved_rows:
        q, scale, minimum = (_separate_halves(part, stored) for part in (q, scale, minimum))
    if stored.columns is not None:
        runs = [slice(run.start // size, run.stop // size) for run in stored.columns.runs]
        q, scale, minimum = (torch.cat([part[:, run] for run in runs], dim=1) for part in (q, scale, minimum))
    return quants.Groups(q, scale, minimum)


def column_order(stored: StoredTensor) -> torch.Tensor:
    """The columns of a matrix as `decode_groups` orders them: [inputs]. Requires `stored.order`."""
    assert stored.scales is not None
    assert stored.scales.ordered is not None
    return codes.by_group(stored.scales.ordered)


def decode_float8(stored: StoredTensor, raw: torch.Tensor, start_group: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole groups of rows of a matrix in FP8, from `start_group` on, as they are, and their scales.

    [rows, inputs] float8, [rows, blocks of columns] float32
    """
    assert stored.scales is not None
    return codes.float8_of(stored, stored.scales, raw, start_group * stored.group_rows)


def _dequantise(stored: StoredTensor, raw: torch.Tensor) -> torch.Tensor:
    quantisation = quants.QUANTISATIONS.get(stored.format)
    if quantisation is None:
        readable = ", ".join([*DENSE, *quants.QUANTISATIONS])
        raise Unsupported(f"{stored.file.path}: weights in {stored.format} are not supported; choose one of {readable}")
    blocks = raw.view(-1, quantisation.block_bytes)
    if raw.device.type != "cpu":
        return quantisation.dequantise(blocks).view(-1)
    values = torch.empty(blocks.shape[0], quantisation.block_elements)
    run = max(1, _RUN_BYTES // quantisation.block_bytes)
    for start in range(0, blocks.shape[0], run):
        values[start : start + run] = quantisation.dequantise(blocks[start : start + run])
    return values.view(-1)


def _unadjusted(stored: StoredTensor, values: torch.Tensor) -> torch.Tensor:
    """The checkpoint's values, in float32, from those of a small tensor of the file."""
    values = values.float()
    if stored.adjustment is Adjustment.PLUS_ONE:
        return values - 1
    if not bool((values <= 0).all()):
        raise Malformed(f"{stored.file.path}: {stored.name} has values that are not negative; convert the model again")
    return torch.log(-values)


def _separate_halves(values: torch.Tensor, stored: StoredTensor) -> torch.Tensor:
    """Rows a0 b0 a1 b1 … at the start of each head become a0 a1 … b0 b1 …"""
    head_rows = stored.interleaved_rows
    if values.shape[0] % head_rows or head_rows % 2:
        raise Malformed(f"{values.shape[0]} rows are not whole heads of {head_rows} rows; download the file again")
    rotated, row_shape = stored.rotated_rows or head_rows, values.shape[1:]
    heads = values.view(-1, head_rows, *row_shape)
    pairs = heads[:, :rotated].reshape(len(heads), rotated // 2, 2, *row_shape)
    halves = pairs.transpose(1, 2).reshape(len(heads), rotated, *row_shape)
    if rotated < head_rows:
        halves = torch.cat((halves, heads[:, rotated:]), dim=1)
    return halves.view(-1, *row_shape)
