"""Published quantised checkpoints: matrices stored as codes, with scales in separate tensors. Needs no torch.

FP8 as Qwen, DeepSeek and NVIDIA publish it, AWQ, GPTQ, and what `compressed-tensors` writes (float8, packed and plain
integers, MXFP4). Each matrix becomes one tensor under the name that it has in the dense checkpoint; `codes.py` decodes
it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from cortex.neuron.weights.errors import Malformed, Unsupported
from cortex.neuron.weights.safetensors.act_order import is_in_order, sorted_by_group
from cortex.neuron.weights.stored import GROUP, ScaleTensors, StoredTensor

_FORMATS: Final = {4: "INT4", 8: "INT8"}
_SCALE_FORMATS: Final = frozenset({"F32", "F16", "BF16"})
_ZERO_FORMATS: Final = frozenset({"F32", "F16", "BF16", "I8", "I32", "I64"})
_UNREAD: Final = frozenset({"activation_scale", "input_scale", "weight_shape", "k_scale", "v_scale", "output_scale"})
"""Tensors of a quantised matrix that are not needed: scales of activations, shapes that are known."""
READABLE_METHODS: Final = ("fp8", "compressed-tensors", "awq", "gptq", "mxfp4")
_MODELOPT: Final = "modelopt"
MODELOPT_ALGORITHMS: Final = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
"""What NVIDIA's library calls the quantisations of it that are read."""


def unreadable_method(quantisation: object) -> str | None:
    """How the weights of a config's `quantization_config` are quantised, if its names say that it cannot be read."""
    described = quantisation if isinstance(quantisation, Mapping) else {}
    method, algorithm = described.get("quant_method"), described.get("quant_algo")
    if method in READABLE_METHODS or (method in (None, _MODELOPT) and algorithm in MODELOPT_ALGORITHMS):
        return None
    return " ".join(str(name)[:80] for name in (method, algorithm) if name) or "method not named, as MLX does"


def assemble(path: Path, config: Mapping[str, Any], stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint with each quantised matrix as one. Raises Unsupported, or Malformed."""
    text = config.get("text_config")
    quantisation = config.get("quantization_config") or (
        text.get("quantization_config") if isinstance(text, Mapping) else None
    )
    # NVIDIA's older files say nothing about it in the config; that matrices have scales shows it.
    described = quantisation if isinstance(quantisation, Mapping) else {}
    block = _block_size(described)
    return _Assembly(path, described, block, separated_stacks(path, config, block, stored)).tensors()


class _Assembly:
    def __init__(
        self,
        path: Path,
        quantisation: Mapping[str, Any],
        block: tuple[int, int] | None,
        stored: dict[str, StoredTensor],
    ) -> None:
        self._path = path
        self._quantisation = quantisation
        self._configured_block = block
        self._stored = stored
        self._left = dict(stored)

    def tensors(self) -> dict[str, StoredTensor]:
        method = self._quantisation.get("quant_method")
        for name, tensor in self._stored.items():
            matrix, _, part = name.rpartition(".")
            if part == "qweight" and method == "awq":
                self._replace(matrix, self._awq(matrix, tensor))
            elif part == "qweight" and method == "gptq":
                self._replace(matrix, self._gptq(matrix, tensor))
            elif part == "weight_packed":
                self._replace(matrix, self._packed(matrix, tensor))
            elif part == "weight" and tensor.format in ("F8_E4M3", "I8") and self._has_scale(matrix):
                self._replace(matrix, self._plain(matrix, tensor))
            elif part == "weight_scale_2":
                raise self._nvfp4(matrix)
        kept = {name: tensor for name, tensor in self._left.items() if name.rpartition(".")[2] not in _UNREAD}
        return sorted_by_group(kept)

    def _replace(self, matrix: str, tensor: StoredTensor) -> None:
        parts = ("qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_scale_inv")
        for part in (*parts, "weight_zero_point", "weight_g_idx", "weight"):
            self._left.pop(f"{matrix}.{part}", None)
        self._left[f"{matrix}.weight"] = tensor

    def _plain(self, matrix: str, codes: StoredTensor) -> StoredTensor:
        """Codes of eight bits, one value each, and a scale for every block, row, or the whole matrix."""
        if codes.is_transposed:
            return self._columns(matrix, codes)
        scale = self._stored.get(f"{matrix}.weight_scale_inv") or self._part(matrix, "weight_scale")
        zero = self._stored.get(f"{matrix}.weight_zero_point")
        if len(codes.shape) != 2:
            raise self._malformed(matrix, f"has the shape {codes.shape}, which is not a matrix")
        shape = scale.shape if len(scale.shape) == 2 else (1, 1)
        if len(scale.shape) == 1 and scale.shape[0] > 1:
            shape = (scale.shape[0], 1)
        if any(count < 1 or count > extent for count, extent in zip(shape, codes.shape, strict=True)):
            raise self._malformed(matrix, f"has the shape {codes.shape}, its scales {scale.shape}")
        if scale.format not in _SCALE_FORMATS:
            raise self._malformed(matrix, f"has scales in {scale.format}, which is not known")
        if len(scale.shape) > 2 or scale.num_elements != shape[0] * shape[1]:
            raise self._malformed(matrix, f"has the shape {codes.shape}, its scales {scale.shape}")
        rows, columns = self._block(matrix, codes.shape, shape)
        if zero is not None and zero.format not in _ZERO_FORMATS:
            raise self._malformed(matrix, f"has zeros in {zero.format}, which is not known")
        if zero is not None and zero.num_elements != scale.num_elements:
            raise self._malformed(matrix, f"has zeros {zero.shape} for scales {scale.shape}")
        is_float = codes.format == "F8_E4M3"
        if not is_float and (columns % GROUP or codes.shape[1] % GROUP):
            raise self._malformed(matrix, f"has groups of {columns} columns, which are not a multiple of {GROUP}")
        scales = ScaleTensors(matrix, "plain", 8, rows, columns, scale, zero)
        return replace(codes, format="FP8" if is_float else "INT8", scales=scales)

    def _columns(self, matrix: str, codes: StoredTensor) -> StoredTensor:
        """A matrix in FP8 by columns, with its scales by columns."""
        scale, in_file = self._part(matrix, "weight_scale_inv"), codes.shape[::-1]
        if any(count > extent for count, extent in zip(scale.shape, in_file, strict=True)):
            raise self._malformed(matrix, f"has {in_file} values by columns, and scales of {scale.shape}")
        if scale.format not in _SCALE_FORMATS:
            raise self._malformed(matrix, f"has scales in {scale.format}, which is not known")
        columns, rows = self._block(matrix, in_file, scale.shape)
        scales = ScaleTensors(matrix, "columns", 8, rows, columns, scale, None)
        return replace(codes, format="FP8", scales=scales, is_transposed=False)

    def _block(self, matrix: str, extents: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int]:
        """How many rows and columns of the file share a scale. Without a configured block, the scales must divide the
        matrix."""
        block = self._configured_block
        if block is not None and scales == tuple(
            -(-extent // size) for extent, size in zip(extents, block, strict=True)
        ):
            return block
        if any(extent % count for extent, count in zip(extents, scales, strict=True)):
            raise self._malformed(matrix, f"has the shape {extents}, which {scales} scales do not divide")
        return extents[0] // scales[0], extents[1] // scales[1]

    def _packed(self, matrix: str, codes: StoredTensor) -> StoredTensor:
        """Integers packed into words along a row, or pairs of four-bit floating-point values in bytes."""
        scale, zero = self._part(matrix, "weight_scale"), self._stored.get(f"{matrix}.weight_zero_point")
        if f"{matrix}.weight_global_scale" in self._stored:
            raise self._nvfp4(matrix)
        if codes.format == "U8" and len(codes.shape) == 2:
            shape = (codes.shape[0], 2 * codes.shape[1])
            if (
                shape[1] % GROUP
                or scale.shape != (shape[0], shape[1] // GROUP)
                or scale.format not in ("U8", "F8_E8M0")
            ):
                raise self._malformed(
                    matrix, f"has the scales {scale.format} {scale.shape}, MXFP4 needs one per {GROUP}"
                )
            return replace(
                codes, shape=shape, format="MXFP4", scales=ScaleTensors(matrix, "mxfp4", 4, 1, GROUP, scale, None)
            )
        if codes.format != "I32" or len(codes.shape) != 2 or len(scale.shape) != 2:
            raise self._malformed(matrix, f"is packed in {codes.format} {codes.shape}, which is not known")
        bits = self._bits()
        shape = (codes.shape[0], codes.shape[1] * 32 // bits)
        ordered = self._stored.get(f"{matrix}.weight_g_idx")
        return self._integers(matrix, "packed", codes, shape, bits, scale, zero, ordered, scale.shape)

    def _gptq(self, matrix: str, codes: StoredTensor) -> StoredTensor:
        """Words along the inputs, one row of the file for each; scales by group, then output."""
        scale, zero = self._part(matrix, "scales"), self._part(matrix, "qzeros")
        if len(codes.shape) != 2 or len(scale.shape) != 2:
            raise self._malformed(matrix, f"has the shape {codes.shape}, which is not a matrix")
        bits = self._bits()
        shape = (codes.shape[1], codes.shape[0] * 32 // bits)
        ordered = self._stored.get(f"{matrix}.g_idx") if self._quantisation.get("desc_act") else None
        kind = "gptq" if self._quantisation.get("checkpoint_format") != "gptq_v2" else "gptq_v2"
        return self._integers(matrix, kind, codes, shape, bits, scale, zero, ordered, scale.shape[::-1])

    def _awq(self, matrix: str, codes: StoredTensor) -> StoredTensor:
        """Words along the outputs, in an order of their own; scales by group, then output."""
        scale, zero = self._part(matrix, "scales"), self._part(matrix, "qzeros")
        if str(self._quantisation.get("version", "gemm")).lower() != "gemm" or self._bits() != 4:
            raise Unsupported(
                f"{self._path} is AWQ in the version {self._quantisation.get('version')!r} with {self._bits()} bits; "
                "supported is the version gemm with 4 bits"
            )
        if len(codes.shape) != 2 or len(scale.shape) != 2:
            raise self._malformed(matrix, f"has the shape {codes.shape}, which is not a matrix")
        shape = (codes.shape[1] * 8, codes.shape[0])
        return self._integers(matrix, "awq", codes, shape, 4, scale, zero, None, scale.shape[::-1])

    def _integers(
        self,
        matrix: str,
        kind: str,
        codes: StoredTensor,
        shape: tuple[int, int],
        bits: int,
        scale: StoredTensor,
        zero: StoredTensor | None,
        ordered: StoredTensor | None,
        scale_shape: tuple[int, ...],
    ) -> StoredTensor:
        outputs, groups = scale_shape
        group = shape[1] // max(1, groups)
        if outputs != shape[0] or group % GROUP or group * groups != shape[1]:
            raise self._malformed(
                matrix,
                f"has {shape[1]} columns and scales for {outputs} x {groups}, which are not whole groups of {GROUP}",
            )
        if ordered is not None and ordered.shape != (shape[1],):
            raise self._malformed(matrix, f"has group indices for {ordered.shape} columns of {shape[1]}")
        self._check_integers(matrix, kind, codes, bits, scale, zero, ordered)
        if ordered is not None and is_in_order(ordered, group):
            ordered = None
        scales = ScaleTensors(matrix, kind, bits, 1, group, scale, zero, ordered)
        name = _FORMATS[bits] if ordered is None else "INT_ORDERED"
        return replace(codes, shape=shape, format=name, scales=scales)

    def _check_integers(
        self,
        matrix: str,
        kind: str,
        codes: StoredTensor,
        bits: int,
        scale: StoredTensor,
        zero: StoredTensor | None,
        ordered: StoredTensor | None,
    ) -> None:
        """Checks that all parts have the shapes and formats that decoding relies on."""
        if codes.format != "I32":
            raise self._malformed(matrix, f"has codes in {codes.format}, not I32")
        if scale.format not in _SCALE_FORMATS:
            raise self._malformed(matrix, f"has scales in {scale.format}, which is not known")
        if ordered is not None and ordered.format not in ("I32", "I64"):
            raise self._malformed(matrix, f"has group indices in {ordered.format}, not I32")
        if zero is None:
            return
        rows, columns = scale.shape
        if kind == "packed":
            is_known = (zero.format == "I32" and zero.shape == (-(-rows * bits // 32), columns)) or (
                zero.format in ("I8", "I32") and zero.shape == scale.shape
            )
        else:
            is_known = zero.format == "I32" and zero.shape == (rows, columns * bits // 32)
        if not is_known:
            raise self._malformed(matrix, f"has zeros {zero.format} {zero.shape} for scales {scale.shape}")

    def _bits(self) -> int:
        bits = self._quantisation.get("bits") or _weights(self._quantisation).get("num_bits")
        if type(bits) is not int or bits not in _FORMATS:
            raise Unsupported(f"{self._path} is quantised in {bits!r} bits; supported are 4 and 8 for all matrices")
        return int(bits)

    def _part(self, matrix: str, part: str) -> StoredTensor:
        try:
            return self._stored[f"{matrix}.{part}"]
        except KeyError:
            raise self._malformed(matrix, f"has no {part}") from None

    def _has_scale(self, matrix: str) -> bool:
        """Also where there should be one."""
        names = (f"{matrix}.weight_scale_inv", f"{matrix}.weight_scale")
        return bool(self._quantisation) or any(name in self._stored for name in names)

    def _nvfp4(self, matrix: str) -> Unsupported:
        return Unsupported(f"{self._path}: {matrix} is in NVFP4, which is not supported; use FP8, INT4 or a GGUF")

    def _malformed(self, matrix: str, reason: str) -> Malformed:
        return Malformed(f"{self._path}: the quantised matrix {matrix[:200]!r} {reason}; download it again")


def _weights(quantisation: Mapping[str, Any]) -> Mapping[str, Any]:
    """How compressed-tensors quantised the weights, where it is the same for all of them."""
    groups = quantisation.get("config_groups")
    listed = groups.values() if isinstance(groups, Mapping) else ()
    found = [group.get("weights") for group in listed if isinstance(group, Mapping)]
    known = [part for part in found if isinstance(part, Mapping)]
    return known[0] if known and all(part == known[0] for part in known) else {}


def _block_size(quantisation: Mapping[str, Any]) -> tuple[int, int] | None:
    """How many rows and columns share a scale, where the config says it."""
    block = quantisation.get("weight_block_size") or _weights(quantisation).get("block_structure")
    if not isinstance(block, list) or len(block) != 2 or any(type(size) is not int or size < 1 for size in block):
        return None
    return block[0], block[1]


_FLOAT8_STACK: Final = re.compile(r"(.+\.experts)\.(gate_up|down)_proj")
_SCALES: Final = ("_scale_inv", "_scale")
_UNREAD_SCALES: Final = ("_activation_scale", "_input_scale")
_PARTS: Final = {"gate_up": ("gate", "up"), "down": ("down",)}
_MAX_EXPERTS: Final = 1 << 12
"""Far above every published model; bounds the work for a damaged file."""


def separated_stacks(
    path: Path, config: Mapping[str, Any], block: tuple[int, int] | None, stored: dict[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, with `….experts.0.gate_proj.weight` and its `weight_scale_inv` and so on in place of
    `….experts.gate_up_proj` and its scales, or with `….experts.0.gate_up_proj.weight` if they are by columns. `block`:
    rows and columns that share a scale, where the config says it. Raises Unsupported, or Malformed."""
    stacks = {
        name: f"{name}{ending}"
        for name, tensor in stored.items()
        for ending in _SCALES
        if tensor.format == "F8_E4M3" and not name.endswith(".weight") and f"{name}{ending}" in stored
    }
    if not stacks:
        return stored
    text = config.get("text_config")
    hidden = (text if isinstance(text, Mapping) else config).get("hidden_size")
    replaced = {f"{name}{ending}" for name in stacks for ending in ("", *_SCALES, *_UNREAD_SCALES)}
    rest = {name: tensor for name, tensor in stored.items() if name not in replaced}
    for name, scale_name in stacks.items():
        match, codes, scale = _FLOAT8_STACK.fullmatch(name), stored[name], stored[scale_name]
        if match is None or len(codes.shape) != 3 or not codes.num_elements or codes.shape[0] > _MAX_EXPERTS:
            raise Malformed(f"{path}: {name[:200]!r} has FP8 values of the shape {codes.shape}, which is not known")
        if _has_columns(match, stored, hidden):
            rest |= _columns(path, match, codes, scale, hidden)
            continue
        if match[2] == "gate_up" and block is not None:
            _check_gate_up(path, name, codes, scale, block[0])
        rest |= _experts(path, match[1], _PARTS[match[2]], codes, scale)
    return rest


def _has_columns(match: re.Match[str], stored: Mapping[str, StoredTensor], hidden: Any) -> bool:
    """Whether a stack has each matrix by columns. The shape of `down_proj` shows it; one of `gate_up_proj` may be
    square."""
    down = stored.get(f"{match[1]}.down_proj")
    if down is not None and len(down.shape) == 3:
        return bool(down.shape[1] != hidden)
    return bool(stored[match[0]].shape[2] != hidden)


def _columns(
    path: Path, match: re.Match[str], codes: StoredTensor, scale: StoredTensor, hidden: Any
) -> Iterator[tuple[str, StoredTensor]]:
    """The matrices of all experts by columns, gate and up as one, and their scales."""
    num_experts, columns, rows = codes.shape
    is_known = columns == hidden and not rows % 2 if match[2] == "gate_up" else rows == hidden
    if not is_known or len(scale.shape) != 3 or not scale.num_elements or scale.shape[0] != num_experts:
        raise Malformed(
            f"{path}: {match[0][:200]!r} has {codes.shape} values and scales of {scale.shape} in a model of {hidden} "
            "columns; download it again"
        )
    for expert in range(num_experts):
        matrix = f"{match[1]}.{expert}.{match[2]}_proj"
        yield f"{matrix}.weight", replace(_part(codes, expert, 0, 1), shape=(rows, columns), is_transposed=True)
        yield f"{matrix}.weight_scale_inv", _part(scale, expert, 0, 1)


def _check_gate_up(path: Path, name: str, codes: StoredTensor, scale: StoredTensor, block_rows: int) -> None:
    """Rejects blocks that mix rows of gate and of up: neither part has a scale of its own for them."""
    rows, inner = codes.shape[1], codes.shape[1] // 2
    num_blocks = -(-rows // block_rows)
    if num_blocks > 1 and inner % block_rows and len(scale.shape) == 3 and scale.shape[1] == num_blocks:
        raise Unsupported(
            f"{path}: {name[:200]!r} has FP8 scales for blocks of {block_rows} rows, which gate and up share, with "
            f"{inner} rows each; use a repository with a tensor for each expert, the dense weights or a GGUF"
        )


def _experts(
    path: Path, prefix: str, parts: tuple[str, ...], codes: StoredTensor, scale: StoredTensor
) -> Iterator[tuple[str, StoredTensor]]:
    """The matrices of all experts, and their scales."""
    num_experts, rows, _ = codes.shape
    shape = scale.shape
    if len(shape) != 3:
        shape = (num_experts, rows, 1) if shape == (num_experts, rows) else (scale.num_elements, 1, 1)
    is_divided = not rows % len(parts) and (shape[1] == 1 or not shape[1] % len(parts))
    if not scale.num_elements or shape[0] not in (1, num_experts) or not is_divided:
        raise Malformed(
            f"{path}: {prefix[:200]!r} has {codes.shape} values and scales of {scale.shape}; download it again"
        )
    scale = replace(scale, shape=shape)
    for expert in range(num_experts):
        for place, part in enumerate(parts):
            matrix = f"{prefix}.{expert}.{part}_proj"
            yield f"{matrix}.weight", _part(codes, expert, place, len(parts))
            shared = shape[1] == 1  # by gate and up
            own = _part(scale, expert % shape[0], 0 if shared else place, 1 if shared else len(parts))
            yield f"{matrix}.weight_scale_inv", own


def _part(stack: StoredTensor, index: int, place: int, num_parts: int) -> StoredTensor:
    """The rows of one part of a matrix in a stack."""
    _, rows, columns = stack.shape
    rows //= num_parts
    num_bytes = rows * columns * (stack.num_bytes // stack.num_elements)
    start = stack.offset + (index * num_parts + place) * num_bytes
    return replace(stack, offset=start, shape=(rows, columns), num_bytes=num_bytes)
