import pytest
import torch
from tests.neuron.kernels.conftest import AssertClose

from cortex.neuron.kernels.attention.rotate import Rotation
from cortex.neuron.kernels.attention.turn import turned


@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 1, 4), (7, 3, 72), (5, 16, 64), (3, 20, 80)])
@pytest.mark.parametrize("is_half", [False, True])
def test_rotation_in_one_pass_matches_its_reference(
    tokens: int,
    heads: int,
    dim: int,
    is_half: bool,
    device: torch.device,
    dtype: torch.dtype,
    assert_close: AssertClose,
) -> None:
    qkv = torch.randn(tokens, 3, heads, dim, device=device, dtype=dtype)
    x = qkv[:, 1, :, dim // 2 :] if is_half else qkv[:, 1]
    angles = torch.randn(tokens, 1, x.shape[-1] // 2, device=device)
    sines = torch.cat((-angles.sin(), angles.sin()), dim=-1)
    rotation = Rotation(torch.cat((angles.cos(),) * 2, dim=-1).to(dtype), sines.to(dtype))
    result = turned(x, rotation)
    assert result.is_contiguous()
    assert_close(result, rotation(x))
