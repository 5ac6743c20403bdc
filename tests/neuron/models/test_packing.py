"""The layout of a matrix by device, format and recipe; the engine and the node's forecast choose the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import pytest
import torch

from cortex.neuron.config import HarnessSettings, NeuronConfig, TorchHarness
from cortex.neuron.engine.errors import LoadError
from cortex.neuron.engine.loading import loading
from cortex.neuron.engine.request import LoadSpec
from cortex.neuron.kernels.cpu.layout import CpuLayout
from cortex.neuron.kernels.float8.layout import FLOAT8_BLOCKS, FLOAT8_ROWS
from cortex.neuron.kernels.layouts import MatrixLayout
from cortex.neuron.kernels.quantised.layout import FP4, Q4, Q6, Q8
from cortex.neuron.kernels.quantised.recipes import RECIPES
from cortex.neuron.models.packing import MatrixDevice, choose_layout, choose_layouts
from cortex.neuron.node.harness import forecast
from cortex.neuron.weights.stored import TensorInfo
from cortex.wire.node.protocol import Device

GPU = MatrixDevice("cuda", "bfloat16")
CPU = MatrixDevice("cpu", "float32", multiplies_codes=True)
DENSE_CPU = MatrixDevice("cpu", "float32")
UP, HEAD, EXPERT = "model.layers.0.mlp.up_proj.weight", "lm_head.weight", "model.layers.0.mlp.experts.3.up_proj.weight"
ABSORBED = "model.layers.0.self_attn.kv_b_proj.weight"


def info(dtype: str, *shape: int, scaled: tuple[int, int] | None = None) -> TensorInfo:
    return TensorInfo(shape or (256, 512), dtype, 0, scaled)


@pytest.mark.parametrize(
    ("device", "name", "tensor", "quant", "expected"),
    [
        (GPU, UP, info("Q4_K"), None, Q4),
        (GPU, UP, info("Q4_K", 256, 48), None, None),
        (GPU, UP, info("Q4_K", 256), None, None),
        (GPU, UP, info("MXFP4"), None, FP4),
        (GPU, UP, info("FP8", scaled=(128, 128)), None, FLOAT8_BLOCKS),
        (GPU, UP, info("FP8", scaled=(64, 64)), None, Q8),
        (GPU, UP, info("BF16"), None, None),
        (GPU, UP, info("BF16"), "q4_k", Q4),
        (GPU, HEAD, info("BF16"), "q4_k", Q6),
        (GPU, EXPERT, info("F32"), "q4_k", Q4),
        (GPU, UP, info("F64"), "q4_k", None),
        (GPU, ABSORBED, info("BF16"), "q4_k", None),
        (GPU, ABSORBED, info("FP8", scaled=(128, 128)), None, None),
        (CPU, ABSORBED, info("Q4_K"), None, None),
        (GPU, UP, info("Q6_K"), "q4_k", Q6),
        (GPU, UP, info("F16"), "fp8", FLOAT8_ROWS),
        (GPU, UP, info("F16", 250, 512), "fp8", Q8),
        (MatrixDevice("cuda", "float16"), UP, info("Q4_K"), None, None),
        (CPU, UP, info("Q4_K"), None, CpuLayout(4)),
        (CPU, EXPERT, info("Q4_K"), None, None),
        (CPU, UP, info("FP8", scaled=(128, 128)), None, None),
        (CPU, UP, info("F32"), None, None),
        (CPU, UP, info("F32"), "q6_k", CpuLayout(6, 16, 32)),
        (CPU, EXPERT, info("F32"), "q6_k", None),
        (CPU, UP, info("F32"), "fp8", None),
        (DENSE_CPU, UP, info("Q4_K"), None, None),
    ],
)
def test_layout_by_device_format_and_recipe(
    device: MatrixDevice, name: str, tensor: TensorInfo, quant: str | None, expected: MatrixLayout | None
) -> None:
    assert choose_layout(device, name, tensor, None if quant is None else RECIPES[quant]) == expected


def test_experts_of_a_stack_are_matrices_of_their_own() -> None:
    stack = {"model.layers.0.mlp.experts.down_proj": info("BF16", 4, 256, 512)}
    layouts = choose_layouts(GPU, stack, RECIPES["q4_k"])
    assert layouts == {f"model.layers.0.mlp.experts.{expert}.down_proj.weight": Q4 for expert in range(4)}


@pytest.mark.parametrize(
    ("device", "quant", "expected"),
    [
        (GPU, "fp8", True),
        (MatrixDevice("cuda", "float32"), "q4_k", False),
        (CPU, "q4_k", True),
        (CPU, "fp8", False),
        (DENSE_CPU, "q4_k", False),
    ],
)
def test_device_quantises_what_it_has_products_for(device: MatrixDevice, quant: str, expected: bool) -> None:
    assert device.quantises(RECIPES[quant]) is expected


TENSORS: Mapping[str, TensorInfo] = {
    UP: info("Q4_K"),
    HEAD: info("F16"),
    EXPERT: info("BF16"),
    "published.weight": info("FP8", scaled=(128, 128)),
    "norm.weight": info("F32", 512),
}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
@pytest.mark.parametrize("quant", [None, "q4_k"])
@pytest.mark.parametrize("is_coded", [False, True])
def test_engine_and_forecast_give_each_matrix_the_same_bytes(
    kind: Literal["cpu", "cuda"],
    dtype: Literal["auto", "float32", "bfloat16"],
    quant: str | None,
    is_coded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forecast, "likely_multiplies_codes", lambda: is_coded)
    monkeypatch.setattr(loading, "multiplies_codes", lambda _: is_coded)
    config = NeuronConfig(harness=HarnessSettings(torch=TorchHarness(dtype=dtype)))
    place = forecast.Forecast(config).matrix_device(Device(index=0, kind=kind, name="d", total_bytes=1 << 30))
    recipe = None if quant is None else RECIPES[quant]
    spec = LoadSpec("m", dtype=dtype, quant=quant)
    if recipe is not None and not place.quantises(recipe):
        with pytest.raises(LoadError, match="cannot be quantised as q4_k"):
            loading.matrix_layouts(TENSORS, spec, torch.device(kind))
        return
    expected = choose_layouts(place, TENSORS, recipe)
    loaded = loading.matrix_layouts(TENSORS, spec, torch.device(kind))
    assert {name: layout.num_bytes(256, 512) for name, layout in loaded.items()} == {
        name: layout.num_bytes(256, 512) for name, layout in expected.items()
    }
    assert loaded == expected
