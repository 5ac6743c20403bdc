"""The codes that a load chooses for dense weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cortex.neuron.kernels.quantised import layout as layouts
from cortex.neuron.kernels.quantised.layout import Layout
from cortex.neuron.kernels.quantised.quantise import quantised

LAYOUTS = [layouts.Q2, layouts.Q3, layouts.Q4, layouts.Q5, layouts.Q6, layouts.Q8]


def decoded(values: Tensor, layout: Layout) -> Tensor:
    code, scale, minimum = quantised(values, layout)
    assert int(code.max()) < 1 << layout.bits
    return (code.view(*scale.shape, layout.group) * scale[..., None] + minimum[..., None]).flatten(1)


def rounded(values: Tensor, layout: Layout) -> Tensor:
    """Every number on the nearest of the evenly spaced levels that cover its group, with scales in bfloat16."""
    groups = values.view(len(values), -1, layout.group)
    steps = (1 << layout.bits) - 1
    if layout.zero is not None:
        step = (groups.abs().amax(-1, keepdim=True) / layout.zero).bfloat16().float()
        low = step * -layout.zero
    else:
        low = groups.amin(-1, keepdim=True).bfloat16().float()
        step = ((groups.amax(-1, keepdim=True) - low) / steps).bfloat16().float()
    return (((groups - low) / step).round().clamp(0, steps) * step + low).flatten(1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", ["normal", "heavy tails"])
def test_error_is_smaller_than_that_of_plain_rounding(layout: Layout, shape: str) -> None:
    torch.manual_seed(0)
    kind = torch.distributions.Normal(0.0, 1.0) if shape == "normal" else torch.distributions.StudentT(4.0)
    values = kind.sample((64, 512))
    error, plain = (decoded(values, layout) - values).norm(), (rounded(values, layout) - values).norm()
    assert error < 0.97 * plain


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_that_the_layout_holds_exactly_are_kept(layout: Layout) -> None:
    """What was quantised before with as many bits loses nothing."""
    torch.manual_seed(0)
    code = torch.randint(0, 1 << layout.bits, (16, 8, layout.group)).float()
    code[..., 0], code[..., 1] = 0, (1 << layout.bits) - 1
    scale = (torch.rand(16, 8, 1) + 0.5).bfloat16().float()
    minimum = -scale * (layout.zero if layout.zero is not None else 4)
    values = (code * scale + minimum).flatten(1)
    torch.testing.assert_close(decoded(values, layout), values, rtol=2**-8, atol=0.02)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1e-38])
def test_constant_groups_are_kept(layout: Layout, value: float) -> None:
    values = torch.full((2, 64), value)
    torch.testing.assert_close(decoded(values, layout), values, rtol=2**-8, atol=1e-30)
