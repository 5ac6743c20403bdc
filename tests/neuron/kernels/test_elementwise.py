from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.neuron.kernels.conftest import AssertClose

from cortex.neuron.kernels.activations import (
    ACTIVATIONS,
    activate,
    activate_reference,
    relu_squared_,
    relu_squared_reference_,
)
from cortex.neuron.kernels.attention.rotate import Rotation, rotate_and_store, rotate_and_store_by
from cortex.neuron.kernels.attention.rules import AttentionRules
from cortex.neuron.kernels.norm import layer_norm, rms_norm, rms_norm_reference, rms_norm_small


@pytest.mark.parametrize("shape", [(1, 576), (5, 4096), (3, 7, 128), (2, 33)])
def test_rms_norm_matches_its_reference(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    x = torch.randn(shape, device=device, dtype=dtype)
    weight = torch.randn(shape[-1], device=device, dtype=dtype)
    expected = rms_norm_reference(x.float(), weight.float(), 1e-6)
    assert_close(rms_norm(x, weight, 1e-6), expected)
    residual = torch.randn(shape, device=device, dtype=dtype)
    assert_close(rms_norm(x, weight, 1e-6, residual), expected + residual.float())
    factor = torch.tensor([0.3], device=device, dtype=dtype)
    assert_close(rms_norm(x, weight, 1e-6, residual, factor), (expected + residual.float()) * factor.float())


@pytest.mark.parametrize("shape", [(1, 576), (5, 1024), (2, 33)])
def test_layer_norm_matches_its_reference(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    x = torch.randn(shape, device=device, dtype=dtype) * 3 + 1
    weight, bias = torch.randn(2, shape[-1], device=device, dtype=dtype)
    for added in (bias, None):
        expected = F.layer_norm(x.float(), shape[-1:], weight.float(), None if added is None else added.float(), 1e-6)
        assert_close(layer_norm(x, weight, added, 1e-6), expected)


@pytest.mark.parametrize("shape", [(1, 576), (5, 2048), (3, 7, 128), (2, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_rms_norm_on_a_cpu_matches_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (torch.randn(shape) * 3 + 1).to(dtype)
    weight = torch.randn(shape[-1])
    expected = rms_norm_reference(x.float(), weight, 1e-6)
    out = rms_norm_small(x, weight, 1e-6)
    assert (out.dtype, out.shape) == (dtype, shape)
    assert (out.float() - expected).norm() / expected.norm() < (1e-6 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize(("tokens", "size"), [(1, 1536), (5, 100), (33, 2050)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_matches_its_reference(
    tokens: int, size: int, activation: str, device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    x = torch.randn(tokens, 2 * size, device=device, dtype=dtype) * 3
    assert_close(activate(x, activation), activate_reference(x.float(), activation))


@pytest.mark.parametrize("shape", [(1, 1536), (5, 100)])
def test_relu_squared_matches_its_reference(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    x = torch.randn(shape, device=device, dtype=dtype)
    x[0, 0] = float("nan")
    expected = relu_squared_reference_(x.float())
    relu_squared_(x)
    assert x[0, 0].isnan()
    assert_close(x.flatten()[1:], expected.flatten()[1:])


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim", "rotated", "normed"),
    [
        (1, 9, 3, 64, 64, False),
        (7, 8, 2, 128, 128, True),
        (5, 6, 2, 96, 32, True),
        (5, 6, 2, 64, 2, True),
        (3, 4, 4, 80, 80, False),
    ],
)
def test_rotate_and_store_matches_its_reference(
    tokens: int,
    heads: int,
    kv_heads: int,
    dim: int,
    rotated: int,
    normed: bool,
    device: torch.device,
    dtype: torch.dtype,
    assert_close: AssertClose,
) -> None:
    projected = torch.randn(tokens, heads + 2 * kv_heads, dim, device=device, dtype=dtype)
    q, k, v = projected.split([heads, kv_heads, kv_heads], dim=1)
    scales = [torch.randn(dim, device=device, dtype=dtype) if normed else None for _ in range(2)]
    positions = torch.randint(0, 500, (tokens,), device=device)
    slots = torch.randperm(8 * 16, device=device)[:tokens]
    rope = torch.randn(500, rotated, device=device)

    def run(function: Callable[..., torch.Tensor], kind: torch.dtype) -> tuple[torch.Tensor, ...]:
        q_scale, k_scale = (None if scale is None else scale.to(kind) for scale in scales)
        rules = AttentionRules(1.0, rope, q_scale, k_scale, eps=1e-6)
        pages = [torch.zeros(8, 16, kv_heads, dim, device=device, dtype=kind) for _ in range(2)]
        out = function(q.to(kind), k.to(kind), v.to(kind), rules, positions, slots, *pages)
        return out, *pages

    def reference(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rules: AttentionRules,
        positions: torch.Tensor,
        slots: torch.Tensor,
        *pages: torch.Tensor,
    ) -> torch.Tensor:
        return rotate_and_store_by(Rotation.at(positions, rope, q.dtype), q, k, v, rules, slots, *pages)

    expected = run(reference, torch.float32)
    for out, exact in zip(run(rotate_and_store, dtype), expected, strict=True):
        assert_close(out, exact)
