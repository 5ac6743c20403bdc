import pytest
import torch
from tests.neuron.kernels.conftest import AssertClose

from cortex.neuron.kernels.attention.rotate import Rotation
from cortex.neuron.kernels.attention.turn import turn_, turn_reference_


@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 1, 4), (7, 3, 72), (5, 16, 64)])
def test_rotation_in_place_matches_its_reference(
    tokens: int, heads: int, dim: int, device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    qkv = torch.randn(tokens, 3, heads, dim, device=device, dtype=dtype)
    angles = torch.randn(tokens, 1, dim // 2, device=device)
    sines = torch.cat((-angles.sin(), angles.sin()), dim=-1)
    rotation = Rotation(torch.cat((angles.cos(),) * 2, dim=-1).to(dtype), sines.to(dtype))
    expected = qkv.clone()
    turn_reference_(expected[:, :2], rotation)
    turn_(qkv[:, :2], rotation)
    assert_close(qkv, expected)
    assert torch.equal(qkv[:, 2], expected[:, 2])
