"""Published quantised checkpoints: every way to store a matrix decodes to the values that its definition gives.

The packers here follow the formats' definitions, one number at a time where that is clearer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cortex.neuron.kernels.float8.layout import FLOAT8_ROWS
from cortex.neuron.kernels.float8.matrix import Float8Matrix
from cortex.neuron.kernels.layouts import MatrixLayout
from cortex.neuron.kernels.quantised.layout import Layout, OrderedLayout
from cortex.neuron.kernels.quantised.matrix import PackedMatrix
from cortex.neuron.kernels.storages import empty_matrix
from cortex.neuron.models.packing import STORED_LAYOUTS
from cortex.neuron.weights.checkpoint import Checkpoint
from cortex.neuron.weights.decode import decode, decode_float8, mapped_bytes
from cortex.neuron.weights.errors import CheckpointError, Malformed, Unsupported
from cortex.neuron.weights.safetensors.checkpoint import SafetensorsCheckpoint
from cortex.neuron.weights.sharded import ShardedCheckpoint, TensorSlice
from cortex.neuron.weights.stored import TensorInfo
from cortex.neuron.weights.transfer import PackedPlacement, PieceSizes, Placement, load_into

OUTPUTS, INPUTS, GROUP = 64, 256, 128
NAME = "model.layers.0.mlp.up_proj"


class Matrix(NamedTuple):
    config: dict[str, Any]
    parts: dict[str, Tensor]
    values: Tensor
    """[OUTPUTS, INPUTS] float32: what the stored parts mean."""


def words(codes: Tensor, bits: int) -> Tensor:
    """[..., n] small values → [..., n · bits / 32] int32, the first in the lowest bits."""
    per_word = 32 // bits
    grouped = codes.reshape(*codes.shape[:-1], -1, per_word).numpy().astype(np.uint32)
    shifted = grouped << np.arange(0, 32, bits, dtype=np.uint32)
    return torch.from_numpy(np.bitwise_or.reduce(shifted, axis=-1).astype(np.uint32).view(np.int32).copy())


def integers(bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [OUTPUTS, INPUTS], scales and zeros [OUTPUTS, groups]."""
    codes = torch.randint(0, 1 << bits, (OUTPUTS, INPUTS))
    scale = (torch.rand(OUTPUTS, INPUTS // GROUP) + 0.5).mul_(2.0**-bits).half()
    zero = torch.randint(1, 1 << bits, (OUTPUTS, INPUTS // GROUP))
    return codes, scale, zero


def affine(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    spread = [part.float().repeat_interleave(GROUP, 1) for part in (scale, zero)]
    return (codes.float() - spread[1]) * spread[0]


def gptq(bits: int = 4, *, is_ordered: bool = False, version: str = "gptq") -> Matrix:
    codes, scale, zero = integers(bits)
    group_of = torch.arange(INPUTS) // GROUP
    if is_ordered:
        group_of = group_of[torch.randperm(INPUTS)]
    values = (codes.float() - zero.float()[:, group_of]) * scale.float()[:, group_of]
    parts = {
        "qweight": words(codes, bits).t().contiguous(),
        "qzeros": words((zero - int(version == "gptq")).t(), bits),
        "scales": scale.t().contiguous(),
        "g_idx": group_of.int(),
    }
    config = {"quant_method": "gptq", "bits": bits, "desc_act": is_ordered, "checkpoint_format": version}
    return Matrix(config, parts, values)


def awq() -> Matrix:
    codes, scale, zero = integers(4)
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # the output in each nibble

    def packed(rows: Tensor) -> Tensor:
        return words(rows.reshape(len(rows), -1, 8)[..., order].flatten(1), 4)

    parts = {"qweight": packed(codes.t()), "qzeros": packed(zero.t()), "scales": scale.t().contiguous()}
    return Matrix({"quant_method": "awq", "bits": 4, "version": "gemm"}, parts, affine(codes, scale, zero))


def compressed(bits: int, *, has_zero: bool = False) -> Matrix:
    codes, scale, zero = integers(bits)
    parts = {
        "weight_packed": words(codes, bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor([OUTPUTS, INPUTS]),
    }
    if has_zero:
        parts["weight_zero_point"] = words(zero.t(), bits).t().contiguous()
    else:
        zero = torch.full_like(zero, 1 << (bits - 1))
    return Matrix(compressed_config(bits), parts, affine(codes, scale, zero))


def compressed_config(bits: int) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": bits}}}}


def plain_integers() -> Matrix:
    codes = torch.randint(-127, 128, (OUTPUTS, INPUTS), dtype=torch.int8)
    scale = (torch.rand(OUTPUTS, 1) + 0.5).mul_(0.01).bfloat16()
    return Matrix(compressed_config(8), {"weight": codes, "weight_scale": scale}, codes.float() * scale.float())


def float8(rows: int, columns: int, scale_name: str, *, is_flat: bool = False) -> Matrix:
    codes = torch.randn(OUTPUTS, INPUTS).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-OUTPUTS // rows), -(-INPUTS // columns)) + 0.5
    spread = scale.repeat_interleave(rows, 0)[:OUTPUTS].repeat_interleave(columns, 1)[:, :INPUTS]
    config: dict[str, Any] = {"quant_method": "fp8"}
    if scale_name == "weight_scale_inv":
        config["weight_block_size"] = [rows, columns]
    else:
        config = compressed_config(8)
    stored = scale.flatten() if is_flat else scale
    return Matrix(config, {"weight": codes, scale_name: stored}, codes.float() * spread)


def of_modelopt(config: dict[str, Any]) -> Matrix:
    whole = float8(OUTPUTS, INPUTS, "weight_scale", is_flat=True)
    scale = whole.parts["weight_scale"].reshape(())
    return Matrix(config, {**whole.parts, "weight_scale": scale, "input_scale": torch.tensor(0.5)}, whole.values)


def of_devstral() -> Matrix:
    whole = of_modelopt({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None})
    scales = {"weight_scale_inv": whole.parts["weight_scale"], "activation_scale": whole.parts["input_scale"]}
    return Matrix(whole.config, {"weight": whole.parts["weight"], **scales}, whole.values)


def mxfp4() -> Matrix:
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = torch.randint(0, 16, (OUTPUTS, INPUTS), dtype=torch.uint8)
    exponent = torch.randint(118, 126, (OUTPUTS, INPUTS // 32), dtype=torch.uint8)
    values = levels[codes.int()] * torch.exp2(exponent.float() - 127).repeat_interleave(32, 1)
    parts = {"weight_packed": codes[:, 0::2] | (codes[:, 1::2] << 4), "weight_scale": exponent}
    return Matrix(compressed_config(4), parts, values)


MATRICES: dict[str, Callable[[], Matrix]] = {
    "gptq": gptq,
    "gptq 8 bits": lambda: gptq(8),
    "gptq v2": lambda: gptq(version="gptq_v2"),
    "gptq in another order": lambda: gptq(is_ordered=True),
    "awq": awq,
    "w4a16": lambda: compressed(4),
    "w4a16 with zeros": lambda: compressed(4, has_zero=True),
    "w8a16": lambda: compressed(8),
    "w8a8": plain_integers,
    "fp8 in blocks": lambda: float8(128, 128, "weight_scale_inv"),
    "fp8 in smaller blocks": lambda: float8(32, 64, "weight_scale_inv"),
    "fp8 in blocks that do not divide it": lambda: float8(48, 96, "weight_scale_inv"),
    "fp8 by row": lambda: float8(1, INPUTS, "weight_scale"),
    "fp8 by row, flat": lambda: float8(1, INPUTS, "weight_scale", is_flat=True),
    "fp8 by matrix": lambda: float8(OUTPUTS, INPUTS, "weight_scale", is_flat=True),
    "fp8 with scales of activations": of_devstral,
    "fp8 of modelopt": lambda: of_modelopt({"quant_method": "modelopt", "quant_algo": "FP8"}),
    "fp8 of modelopt, which only its scales show": lambda: of_modelopt({}),
    "mxfp4": mxfp4,
}


@pytest.fixture(params=MATRICES)
def matrix(request: pytest.FixtureRequest) -> Matrix:
    torch.manual_seed(3)
    return MATRICES[request.param]()


def opened(path: Path, matrix: Matrix) -> SafetensorsCheckpoint:
    save_file({f"{NAME}.{part}": tensor for part, tensor in matrix.parts.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": matrix.config}))
    return SafetensorsCheckpoint(path)


def test_stored_matrix_has_the_dense_name_and_shape_and_reads_as_its_values(tmp_path: Path, matrix: Matrix) -> None:
    checkpoint = opened(tmp_path, matrix)
    assert list(checkpoint.tensors) == [f"{NAME}.weight"]
    assert checkpoint.tensors[f"{NAME}.weight"].shape == (OUTPUTS, INPUTS)
    values = checkpoint.read(f"{NAME}.weight")
    torch.testing.assert_close(values, matrix.values, rtol=1e-6, atol=1e-6)


def load_in_pieces(checkpoint: Checkpoint, placement: Placement | PackedPlacement) -> None:
    dense, packed = ([placement], []) if isinstance(placement, Placement) else ([], [placement])
    sizes = PieceSizes(num_bytes=1024, cached_weights=1024)
    load_into(checkpoint, dense, packed, progress=lambda *_: None, cancelled=lambda: False, sizes=sizes)


def test_dense_destination_gets_the_numbers_in_pieces(tmp_path: Path, matrix: Matrix) -> None:
    destination = torch.full((OUTPUTS, INPUTS), torch.nan)
    placement = Placement(f"{NAME}.weight", destination)
    load_in_pieces(opened(tmp_path, matrix), placement)
    torch.testing.assert_close(destination, matrix.values, rtol=1e-6, atol=1e-6)


def empty_packed(info: TensorInfo) -> PackedMatrix:
    """As on a GPU, but FP8 in groups of columns."""
    layout: MatrixLayout = STORED_LAYOUTS[info.dtype]
    if info.order is not None:
        assert isinstance(layout, Layout)
        layout = OrderedLayout(layout, info.order)
    outputs, inputs = info.shape
    packed = empty_matrix(layout, outputs, inputs, torch.device("cpu"))
    assert isinstance(packed, PackedMatrix)
    return packed


def test_packed_matrix_keeps_the_values(tmp_path: Path, matrix: Matrix) -> None:
    checkpoint = opened(tmp_path, matrix)
    packed = empty_packed(checkpoint.tensors[f"{NAME}.weight"])
    placement = PackedPlacement(f"{NAME}.weight", packed, 0, OUTPUTS)
    load_in_pieces(checkpoint, placement)
    layout = packed.codes.layout
    if layout.has_zeros or layout.codebook:
        torch.testing.assert_close(packed.values(), matrix.values, rtol=2**-16, atol=1e-6)
    else:
        error = (packed.values() - matrix.values).norm() / matrix.values.norm()
        assert error < 0.006  # eight bits where there are no groups


def test_mxfp4_is_exact(tmp_path: Path) -> None:
    matrix = mxfp4()
    torch.testing.assert_close(opened(tmp_path, matrix).read(f"{NAME}.weight"), matrix.values, rtol=0, atol=0)


@pytest.mark.parametrize("columns", [range(128), range(128, 256), range(64, 96), range(96, 256), range(256)], ids=str)
def test_columns_of_a_matrix_are_those_of_the_whole_one(tmp_path: Path, matrix: Matrix, columns: range) -> None:
    """Dense, packed, and in pieces: a rank of a divided model reads a part of each row."""
    name = f"{NAME}.weight"
    checkpoint = opened(tmp_path, matrix)
    expected = checkpoint.read(name)[:, columns.start : columns.stop]
    part = ShardedCheckpoint(checkpoint, {name: TensorSlice(columns=columns)})
    assert part.tensors[name].shape == (OUTPUTS, len(columns))
    assert torch.equal(part.read(name), expected)
    destination = torch.full((OUTPUTS, len(columns)), torch.nan)
    load_in_pieces(part, Placement(name, destination))
    assert torch.equal(destination, expected)
    packed = empty_packed(part.tensors[name])
    load_in_pieces(part, PackedPlacement(name, packed, 0, OUTPUTS))
    assert (packed.values() - expected).norm() / expected.norm() < 0.006
    twice = part.stored(name).with_columns(range(0, 32))
    assert torch.equal(decode(twice, mapped_bytes(twice)), expected[:, :32])


@pytest.mark.parametrize(
    ("name", "columns", "expected"),
    [
        ("fp8 in blocks", range(128, 256), (64, 128)),
        ("fp8 in blocks", range(64), (64, 64)),
        ("fp8 in blocks", range(64, 192), None),
        ("fp8 in smaller blocks", range(64, 192), (32, 64)),
        ("fp8 in smaller blocks", range(32, 192), None),
        ("fp8 by row", range(64, 192), (1, 128)),
    ],
)
def test_columns_in_fp8_keep_their_scales_where_no_block_is_cut(
    tmp_path: Path, name: str, columns: range, expected: tuple[int, int] | None
) -> None:
    whole = opened(tmp_path, MATRICES[name]()).stored(f"{NAME}.weight")
    part = whole.with_columns(columns)
    assert part.scaled == expected
    if expected is not None:
        values, scale = decode_float8(part, mapped_bytes(part))
        spread = scale.repeat_interleave(expected[1], 1)[:, : len(columns)]
        assert torch.equal(values.float() * spread, decode(part, mapped_bytes(part)))


@pytest.mark.parametrize(
    ("name", "rows", "expected"),
    [
        ("fp8 in smaller blocks", (range(32, 64),), (32, 64)),
        ("fp8 in smaller blocks", (range(16, 48),), None),
        ("fp8 by row", (range(16, 48),), (1, INPUTS)),
        ("fp8 by matrix", (range(16, 48),), (32, INPUTS)),
        ("fp8 by matrix", (range(16), range(32, 64)), (48, INPUTS)),
    ],
)
def test_rows_in_fp8_keep_their_scales_where_no_block_is_cut(
    tmp_path: Path, name: str, rows: tuple[range, ...], expected: tuple[int, int] | None
) -> None:
    part = opened(tmp_path, MATRICES[name]()).stored(f"{NAME}.weight").with_rows(rows)
    assert part.scaled == expected
    if expected is not None:
        values, scale = decode_float8(part, mapped_bytes(part))
        assert torch.equal(values.float() * scale.repeat_interleave(expected[1], 1), decode(part, mapped_bytes(part)))


@pytest.mark.parametrize("name", ["awq", "gptq", "w4a16", "w8a8", "mxfp4"])
def test_columns_that_cut_a_group_are_rejected(tmp_path: Path, name: str) -> None:
    stored = opened(tmp_path, MATRICES[name]()).stored(f"{NAME}.weight")
    with pytest.raises(Unsupported, match=r"blocks of 32, cannot be divided after 80; use fewer devices, `pipeline"):
        stored.with_columns(range(80))


def test_rows_in_another_order_are_read_in_that_order(tmp_path: Path, matrix: Matrix) -> None:
    stored = opened(tmp_path, matrix).stored(f"{NAME}.weight")
    half = OUTPUTS // 2
    values = decode(stored, mapped_bytes(stored))
    moved = stored.with_rows((range(half, OUTPUTS), range(0, 8))).with_rows((range(half - 3, half + 2),))
    expected = torch.cat((values[OUTPUTS - 3 :], values[:2]))
    assert torch.equal(decode(moved, mapped_bytes(moved)), expected)


def replaced(matrix: Matrix, **parts: Tensor | None) -> Matrix:
    kept = {name: tensor for name, tensor in {**matrix.parts, **parts}.items() if tensor is not None}
    return matrix._replace(parts=kept)


BROKEN: dict[str, tuple[Callable[[], Matrix], type[CheckpointError], str]] = {
    "no scales": (lambda: replaced(awq(), scales=None), Malformed, "up_proj' has no scales"),
    "scales of other groups": (
        lambda: replaced(awq(), scales=torch.ones(3, OUTPUTS)),
        Malformed,
        "256 columns and scales for 64 x 3",
    ),
    "groups that are too small": (
        lambda: replaced(compressed(4), weight_scale=torch.ones(OUTPUTS, 16)),
        Malformed,
        "not whole groups of 32",
    ),
    "scales that do not divide it": (
        lambda: replaced(float8(1, INPUTS, "weight_scale"), weight_scale=torch.ones(5, 1)),
        Malformed,
        r"which \(5, 1\) scales do not divide",
    ),
    "more scales than rows": (
        lambda: replaced(float8(1, INPUTS, "weight_scale"), weight_scale=torch.ones(65, 1)),
        Malformed,
        r"its scales \(65, 1\)",
    ),
    "three bits": (
        lambda: gptq()._replace(config={"quant_method": "gptq", "bits": 3}),
        Unsupported,
        "3 bits; supported are 4 and 8",
    ),
    "awq for another kernel": (
        lambda: awq()._replace(config={"quant_method": "awq", "bits": 4, "version": "gemv"}),
        Unsupported,
        "'gemv'",
    ),
    "nvfp4": (lambda: replaced(mxfp4(), weight_global_scale=torch.ones(1)), Unsupported, "NVFP4"),
    "nvfp4 of modelopt": (
        lambda: replaced(of_modelopt({}), weight=mxfp4().parts["weight_packed"], weight_scale_2=torch.ones(())),
        Unsupported,
        "NVFP4",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_checkpoint_that_cannot_be_read_is_rejected_when_it_is_opened(tmp_path: Path, case: str) -> None:
    make, error, words_of_error = BROKEN[case]
    with pytest.raises(error, match=words_of_error):
        opened(tmp_path, make())


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_scales_that_are_not_numbers_are_rejected_by_name(tmp_path: Path, broken: float) -> None:
    matrix = compressed(4)
    matrix.parts["weight_scale"][3, 1] = broken
    with pytest.raises(Malformed, match=r"up_proj has scales that are not finite"):
        opened(tmp_path, matrix).read(f"{NAME}.weight")


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_float8_numbers_that_are_nan_are_rejected_where_they_stay_as_they_are(tmp_path: Path, code: int) -> None:
    matrix = float8(1, INPUTS, "weight_scale")
    matrix.parts["weight"].view(torch.uint8)[3, 1] = code
    kept = Float8Matrix(FLOAT8_ROWS, OUTPUTS, INPUTS, torch.device("cpu"))
    placement = PackedPlacement(f"{NAME}.weight", kept, 0, OUTPUTS)
    with pytest.raises(Malformed, match=r"up_proj.weight in FP8 has weights that are not finite"):
        load_into(opened(tmp_path, matrix), [], [placement], progress=lambda *_: None, cancelled=lambda: False)


@pytest.mark.parametrize("kind", [torch.float16, torch.float32, torch.bfloat16], ids=str)
def test_scales_of_any_precision_are_kept(tmp_path: Path, kind: torch.dtype) -> None:
    """float32 to 16 bits of the fraction, the others to the last bit."""
    whole = compressed(4, has_zero=True)
    scale = (torch.rand(OUTPUTS, INPUTS // GROUP) * 0.1 + 1e-3).to(kind)
    codes = torch.randint(0, 16, (OUTPUTS, INPUTS))
    zero = torch.randint(0, 16, scale.shape)
    parts = {
        "weight_packed": words(codes, 4),
        "weight_scale": scale,
        "weight_zero_point": words(zero.t(), 4).t().contiguous(),
    }
    checkpoint = opened(tmp_path, Matrix(whole.config, parts, affine(codes, scale, zero)))
    packed = PackedMatrix(STORED_LAYOUTS["INT4"], OUTPUTS, INPUTS, torch.device("cpu"))
    placement = PackedPlacement(f"{NAME}.weight", packed, 0, OUTPUTS)
    load_into(checkpoint, [], [placement], progress=lambda *_: None, cancelled=lambda: False)
    tolerance = 2**-16 if kind == torch.float32 else 0
    torch.testing.assert_close(packed.values(), affine(codes, scale, zero), rtol=tolerance, atol=0)


@pytest.mark.parametrize("zero", [0.5, 128.0, -129.0])
def test_zeros_that_are_no_codes_are_rejected_by_name(tmp_path: Path, zero: float) -> None:
    matrix = plain_integers()
    scale = matrix.parts["weight_scale"]
    broken = {**matrix.parts, "weight_zero_point": torch.full(scale.shape, zero)}
    with pytest.raises(Malformed, match="zeros that are not codes"):
        opened(tmp_path, matrix._replace(parts=broken)).read(f"{NAME}.weight")
