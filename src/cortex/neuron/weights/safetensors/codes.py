"""Decodes the matrices of published quantised checkpoints, on the device that holds their bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from cortex.neuron.weights.errors import Malformed
from cortex.neuron.weights.gguf.quants import Groups, four_bit_floats
from cortex.neuron.weights.stored import GROUP, ScaleTensors, StoredTensor

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which nibble of a word each of eight outputs is."""
_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E8M0": torch.uint8,
}


def values_of(stored: StoredTensor, scales: ScaleTensors, raw: Tensor, first_row: int) -> Tensor:
    """Rows of a quantised matrix in float32. raw: their bytes, flat → [rows, inputs]"""
    if stored.format == "FP8":
        raw = raw.view(-1, *stored.row_shape)
        if scales.is_transposed:
            raw = raw.view(*stored.row_shape, -1).t()[_rows(stored, 0, stored.num_rows, raw.device)]
        values = raw.contiguous().view(torch.float8_e4m3fn).float()
        return _columns(
            stored, values * _block_scales(stored, scales, _rows(stored, first_row, len(values), raw.device))
        )
    if scales.ordered is None or scales.is_sorted:
        groups = groups_of(stored, scales, raw, first_row)
        return groups.values().flatten(1)
    codes = _codes(stored, scales, raw)
    column_group = _read(scales.ordered).to(raw.device).long()
    rows = _rows(stored, first_row, len(codes), raw.device)
    scale, zero = (part[rows] for part in _group_scales(stored, scales, raw.device))
    if not 0 <= int(column_group.min()) <= int(column_group.max()) < scale.shape[1]:
        raise Malformed(f"{stored.file.path}: {scales.name} has columns in groups without scales; download it again")
    return _columns(stored, (codes.float() - zero[:, column_group]) * scale[:, column_group])


def float8_of(stored: StoredTensor, scales: ScaleTensors, raw: Tensor, first_row: int) -> tuple[Tensor, Tensor]:
    """Rows of a matrix in FP8 as they are, and their scales: [rows, inputs] float8, [rows, blocks] float32. Requires
    `stored.scaled`."""
    assert stored.scaled is not None
    values = raw.view(torch.float8_e4m3fn).view(-1, *stored.row_shape)
    scale = _finite(stored, scales, _read(scales.scale).float())
    rows = _rows(stored, first_row, len(values), torch.device("cpu"))
    blocks = _positions(stored.columns_in_file(), rows.device)[:: stored.scaled[1]] // scales.columns
    scale = (scale if scale.dim() == 2 else scale.view(-1, 1))[rows // scales.rows][:, blocks]
    return _columns(stored, values), scale.to(raw.device)


def groups_of(stored: StoredTensor, scales: ScaleTensors, raw: Tensor, first_row: int) -> Groups:
    """Rows of a matrix of integers as codes, scales and minimums: [rows, groups, 32 or 1]. Its columns are sorted by
    group."""
    if scales.kind == "mxfp4":
        return _mxfp4(stored, scales, raw, first_row)
    codes = _codes(stored, scales, raw)
    if scales.ordered is not None:
        codes = codes[:, by_group(scales.ordered).to(raw.device)]
    rows = _rows(stored, first_row, len(codes), raw.device)
    if scales.kind == "plain":
        scale = _block_scales(stored, scales, rows)[:, ::GROUP]
        zero = torch.full_like(scale, 128.0)
        if scales.zero is not None:
            zero = _spread(_zeros(stored, scales, 128.0), stored, scales, rows)[:, ::GROUP]
    else:
        scale, zero = (part[rows] for part in _group_scales(stored, scales, raw.device))
        repeats = scales.columns // GROUP
        scale, zero = scale.repeat_interleave(repeats, 1), zero.repeat_interleave(repeats, 1)
    return _groups(stored, codes, scale, -zero * scale)


def by_group(groups: StoredTensor) -> Tensor:
    """The columns of a matrix in the order of their groups, in which kernels read them: [inputs]"""
    return torch.argsort(_read(groups), stable=True)


def _groups(stored: StoredTensor, codes: Tensor, scale: Tensor, minimum: Tensor) -> Groups:
    """codes: [rows, inputs of the file]; scale, minimum: [rows, groups of the file]"""
    by_group = (codes.view(len(codes), -1, GROUP), scale[..., None], minimum[..., None])
    return Groups(*(_columns(stored, part, GROUP) for part in by_group))


def _columns(stored: StoredTensor, part: Tensor, size: int = 1) -> Tensor:
    """The columns of the matrix among those of the file: [rows, columns of the file / size, ...]"""
    if stored.columns is None:
        return part
    runs = [slice(run.start // size, -(-run.stop // size)) for run in stored.columns.runs]
    return torch.cat([part[:, run] for run in runs], dim=1)


def _codes(stored: StoredTensor, scales: ScaleTensors, raw: Tensor) -> Tensor:
    """[rows, inputs of the file] uint8"""
    if scales.kind == "plain":
        return (raw.view(torch.int8).view(-1, *stored.row_shape).to(torch.int16) + 128).to(torch.uint8)
    words = raw.view(torch.int32)
    (inputs,) = stored.row_shape
    if scales.kind == "packed":
        return _unpacked(words.view(-1, inputs * scales.bits // 32), scales.bits).flatten(1)
    outputs = stored.num_rows if stored.rows is None else stored.rows.width
    if scales.kind == "awq":
        codes = _unpacked(words.view(inputs, -1), 4)[..., _AWQ_ORDER].reshape(inputs, outputs).t()
    else:
        codes = _unpacked(words.view(-1, outputs).t().contiguous(), scales.bits).flatten(1)
    if stored.rows is None and scales.row_order is None:
        return codes.contiguous()
    return codes[_rows(stored, 0, stored.num_rows, raw.device)]


def _rows(stored: StoredTensor, first_row: int, num_rows: int, device: torch.device) -> Tensor:
    """Where some rows are in the file: [rows]"""
    rows = _positions(stored.rows_in_file(first_row, num_rows), device)
    if stored.scales is None or stored.scales.row_order is None:
        return rows
    return by_group(stored.scales.row_order).to(device)[rows]


def _positions(runs: tuple[range, ...], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(run.start, run.stop, device=device) for run in runs])


def _group_scales(stored: StoredTensor, scales: ScaleTensors, device: torch.device) -> tuple[Tensor, Tensor]:
    """Scales and zeros of all rows: [outputs, groups] float32"""
    scale = _finite(stored, scales, _read(scales.scale).float()).to(device)
    middle = float(1 << (scales.bits - 1))
    if scales.kind == "packed":
        if scales.zero is None:
            return scale, torch.full_like(scale, middle)
        if scales.zero.format == "I32" and scales.zero.shape != scale.shape:  # words along the outputs
            packed = _read(scales.zero).to(device)
            packed = _unpacked(packed.t().contiguous(), scales.bits).flatten(1).t()[: len(scale)]
            return scale, packed.float()
        return scale, _zeros(stored, scales, middle).to(device)
    scale = scale.t()
    assert scales.zero is not None
    zero = _unpacked(_read(scales.zero).to(device), scales.bits)
    if scales.kind == "awq":
        zero = zero[..., _AWQ_ORDER]
    zero = zero.flatten(1).t().float()
    return scale, (zero + 1) % 256 if scales.kind == "gptq" else zero  # stored one lower, in as many bits as codes


def _block_scales(stored: StoredTensor, scales: ScaleTensors, rows: Tensor) -> Tensor:
    """The scale of every element of some rows of the file: [rows, inputs of the file]"""
    scale = _finite(stored, scales, _read(scales.scale).float())
    return _spread(scale.t() if scales.is_transposed else scale, stored, scales, rows)


def _spread(by_block: Tensor, stored: StoredTensor, scales: ScaleTensors, rows: Tensor) -> Tensor:
    """Repeats the value of each block for every element of some rows of the file: [rows, inputs of the file]"""
    by_block = (by_block if by_block.dim() == 2 else by_block.view(-1, 1)).to(rows.device)
    column = torch.arange(*stored.row_shape, device=rows.device) // scales.columns
    return by_block[rows // scales.rows][:, column]


def _mxfp4(stored: StoredTensor, scales: ScaleTensors, raw: Tensor, first_row: int) -> Groups:
    pairs = raw.view(-1, stored.row_shape[0] // 2)
    packed = torch.stack((pairs & 0xF, pairs >> 4), -1).view(len(pairs), -1, GROUP)
    exponent = _read(scales.scale)[_rows(stored, first_row, len(pairs), torch.device("cpu"))]
    if bool((exponent == 255).any()):
        raise Malformed(f"{stored.file.path}: {scales.name} has scales that are not finite; download it again")
    groups = four_bit_floats(packed, exponent.to(raw.device)[..., None])
    return Groups(*(_columns(stored, part, GROUP) for part in (groups.q, groups.scale, groups.minimum)))


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """[..., words] int32 → [..., words, 32 / bits] uint8, the low bits first"""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8)


def _read(stored: StoredTensor) -> Tensor:
    """A small tensor, as stored, on the CPU."""
    raw = torch.frombuffer(stored.file.buffer, dtype=torch.uint8, count=stored.num_bytes, offset=stored.offset)
    dtype = _DTYPES.get(stored.format)
    if dtype is None:
        raise Malformed(f"{stored.file.path}: scales in {stored.format} are not known; download it again")
    return (raw.clone() if stored.offset % dtype.itemsize else raw).view(dtype).view(stored.shape)


def _zeros(stored: StoredTensor, scales: ScaleTensors, middle: float) -> Tensor:
    """The codes that stand for 0, of zeros that are stored as their distance from the middle one."""
    assert scales.zero is not None
    zero = _read(scales.zero).float() + middle
    if not bool(((zero >= 0) & (zero < 256) & (zero == zero.round())).all()):
        raise Malformed(f"{stored.file.path}: {scales.name} has zeros that are not codes; download it again")
    return zero


def _finite(stored: StoredTensor, scales: ScaleTensors, scale: Tensor) -> Tensor:
    if not bool(torch.isfinite(scale).all()):
        raise Malformed(f"{stored.file.path}: {scales.name} has scales that are not finite; download it again")
    return scale
