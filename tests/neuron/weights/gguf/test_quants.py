"""Every quantisation against the `gguf` package, bit for bit, on random blocks with ordinary and extreme scales."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from cortex.neuron.kernels.quantised.layout import GGML_LAYOUTS
from cortex.neuron.kernels.quantised.matrix import PackedMatrix
from cortex.neuron.weights.gguf.quants import QUANTISATIONS

SCALES_AT = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
}
"""Byte positions of the float16 scales of a block, which random bytes would make infinite or NaN."""
EXTREMES = np.array([0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 65504.0, -65504.0, 1.0], dtype=np.float16)


def random_blocks(name: str, count: int, scales: np.ndarray) -> np.ndarray:
    random = np.random.default_rng(7)
    blocks = random.integers(0, 256, (count, QUANTISATIONS[name].block_bytes), dtype=np.uint8)
    for at in SCALES_AT[name]:
        blocks[:, at : at + 2] = random.permutation(scales).astype(np.float16).view(np.uint8).reshape(count, 2)
    if name == "MXFP4":  # its scale is a power of two
        blocks[:, 0] = np.frexp(scales.astype(np.float64))[1] + 128
    return blocks


def ordinary_scales(count: int) -> np.ndarray:
    return np.random.default_rng(3).normal(0, 0.1, count)


def test_every_format_is_decoded_and_has_a_layout() -> None:
    assert set(SCALES_AT) == set(QUANTISATIONS) == set(GGML_LAYOUTS)


@pytest.mark.parametrize("name", SCALES_AT)
@pytest.mark.parametrize("scales", [ordinary_scales(400), np.tile(EXTREMES, 50)], ids=["ordinary", "extreme"])
def test_blocks_decode_bit_exactly(name: str, scales: np.ndarray) -> None:
    blocks = random_blocks(name, 400, scales)
    values = QUANTISATIONS[name].dequantise(torch.from_numpy(blocks))
    assert values.dtype == torch.float32
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(values.numpy(), expected)


@pytest.mark.parametrize("name", SCALES_AT)
def test_packed_blocks_keep_their_codes_and_round_only_their_scales(name: str) -> None:
    quantisation, layout = QUANTISATIONS[name], GGML_LAYOUTS[name]
    rows, columns = 8, 512
    count = rows * columns // quantisation.block_elements
    blocks = torch.from_numpy(random_blocks(name, count, ordinary_scales(count)))
    groups = quantisation.groups(blocks)
    code, scale, minimum = (part.reshape(rows, -1) for part in (groups.q, groups.scale, groups.minimum))
    matrix = PackedMatrix(layout, rows, columns, torch.device("cpu"))
    matrix.put_codes(0, code, scale, minimum)
    grouped = code.view(rows, -1, layout.group).float()
    scale, minimum = scale.bfloat16().float()[..., None], minimum.bfloat16().float()[..., None]
    expected = scale * (grouped - layout.zero) if layout.zero is not None else grouped * scale + minimum
    torch.testing.assert_close(matrix.values(), expected.flatten(1), rtol=0, atol=0)
    dense = quantisation.dequantise(blocks).view(rows, columns)
    assert (matrix.values() - dense).norm() / dense.norm() < 0.005


@pytest.mark.parametrize("name", SCALES_AT)
def test_zero_blocks_decode_to_zero_elements(name: str) -> None:
    quantisation = QUANTISATIONS[name]
    empty = torch.empty(0, quantisation.block_bytes, dtype=torch.uint8)
    assert quantisation.dequantise(empty).shape == (0, quantisation.block_elements)
