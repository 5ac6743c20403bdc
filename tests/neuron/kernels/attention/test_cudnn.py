"""Whole prompts through cuDNN's attention; without a GPU, through torch's own."""

from collections.abc import Callable

import pytest
import torch
from tests.neuron.kernels.attention.test_paged import PAGE_TOKENS, make_batch
from tests.neuron.kernels.conftest import AssertClose

from cortex.neuron.kernels.attention import cudnn
from cortex.neuron.kernels.attention.cudnn import Geometry, planned_length, planned_lengths
from cortex.neuron.kernels.attention.paged import attention, attention_reference
from cortex.neuron.kernels.attention.rules import AttentionRules
from cortex.neuron.kernels.batch import Batch
from cortex.neuron.private_api.torch import CUDNN_ATTENTION

from ...failed_probes import fail_probe

HEADS, KV_HEADS, DIM = 4, 2, 64


@pytest.mark.parametrize(
    ("count", "length"),
    [(1, 128), (1024, 1024), (1025, 1152), (2048, 2048), (2049, 2304), (8192, 8192), (8193, 9216), (16384, 16384)],
)
def test_pads_a_prompt_to_the_next_length(count: int, length: int) -> None:
    assert planned_length(count) == length


def test_padding_adds_at_most_an_eighth_with_33_lengths() -> None:
    lengths = list(planned_lengths(16384))
    assert lengths[0] == 1024
    assert lengths[-1] == 16384
    assert len(lengths) == 33
    for count in range(1024, 16385):
        length = planned_length(count)
        assert length in lengths
        assert count <= length <= count * 9 / 8


def test_lengths_end_at_the_longest_prompt() -> None:
    assert list(planned_lengths(1100)) == [1024, 1152]
    assert list(planned_lengths(800)) == []


@pytest.fixture
def prepared(device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> Geometry:
    """Prompts of 16 tokens and more use cuDNN; plans for up to 160 tokens are built."""
    monkeypatch.setattr(cudnn, "SHORTEST", 16)
    monkeypatch.setattr(cudnn, "plans", cudnn.Plans())
    geometry = Geometry(device, dtype, HEADS, KV_HEADS, DIM)
    for length in planned_lengths(160):
        cudnn.prepare(geometry, DIM**-0.5, length)
    return geometry


def run(
    batch: Batch,
    num_pages: int,
    device: torch.device,
    dtype: torch.dtype,
    function: Callable[..., torch.Tensor],
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    projected = torch.randn(len(batch.positions), HEADS + 2 * KV_HEADS, DIM).to(device, dtype)
    pages = torch.randn(2, num_pages, PAGE_TOKENS, KV_HEADS, DIM).to(device, dtype)
    angles = torch.randn(int(max(batch.lengths)), DIM // 2)
    rope = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
    rules = AttentionRules(DIM**-0.5, rope, window=window)
    q, k, v = projected.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    return function(q, k, v, rules, batch, *pages), pages


@pytest.mark.parametrize(
    ("decode_lengths", "prefills"),
    [([], [(0, 128)]), ([5, 90], [(0, 33)]), ([3], [(0, 77), (0, 16)])],
)
def test_whole_prompts_match_the_reference(
    decode_lengths: list[int],
    prefills: list[tuple[int, int]],
    device: torch.device,
    dtype: torch.dtype,
    assert_close: AssertClose,
    prepared: Geometry,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, num_pages = make_batch(decode_lengths, prefills, device)
    monkeypatch.setattr("cortex.neuron.kernels.attention.prefill.prefill_attention", None)  # must not be called
    out, kept = run(batch, num_pages, device, dtype, attention)
    expected, expected_kept = run(batch, num_pages, device, torch.float32, attention_reference)
    assert_close(out, expected)
    assert_close(kept, expected_kept)


def test_gather_pads_with_zeros_where_pages_hold_nan(
    device: torch.device, dtype: torch.dtype, prepared: Geometry
) -> None:
    table = torch.tensor([2, 1], dtype=torch.int32, device=device)
    pages = torch.full((2, 3, PAGE_TOKENS, KV_HEADS, DIM), float("nan"), device=device, dtype=dtype)
    pages[:, 2] = 1.0
    pages[:, 1, :5] = 2.0
    keys, values = cudnn.gather(table, PAGE_TOKENS + 5, 64, pages[0], pages[1], pages.dtype)
    for gathered in (keys, values):
        assert (gathered[:PAGE_TOKENS] == 1.0).all()
        assert (gathered[PAGE_TOKENS : PAGE_TOKENS + 5] == 2.0).all()
        assert (gathered[PAGE_TOKENS + 5 :] == 0.0).all()


@pytest.mark.parametrize(
    ("prefills", "window", "why"),
    [
        ([(32, 64)], None, "does not start at position 0"),
        ([(0, 8)], None, "too short"),
        ([(0, 64), (0, 8)], None, "one of them is too short"),
        ([(0, 64)], 50, "sliding window"),
        ([(0, 200)], None, "no plan for this length"),
    ],
)
def test_uses_our_own_kernel_where_cudnn_does_not_apply(
    prefills: list[tuple[int, int]],
    window: int | None,
    why: str,
    device: torch.device,
    dtype: torch.dtype,
    prepared: Geometry,
) -> None:
    batch, _ = make_batch([], prefills, device)
    q = torch.empty(len(batch.positions), HEADS, DIM, device=device, dtype=dtype)
    rules = AttentionRules(DIM**-0.5, torch.empty(0), window=window)
    assert not cudnn.takes(q, KV_HEADS, rules, batch), why


def test_plan_applies_only_to_its_geometry(device: torch.device, dtype: torch.dtype, prepared: Geometry) -> None:
    batch, _ = make_batch([], [(0, 64)], device)
    rules = AttentionRules(DIM**-0.5, torch.empty(0))
    assert cudnn.takes(torch.empty(64, HEADS, DIM, device=device, dtype=dtype), KV_HEADS, rules, batch)
    assert not cudnn.takes(torch.empty(64, 2 * HEADS, DIM, device=device, dtype=dtype), KV_HEADS, rules, batch)


def test_prompts_use_our_own_kernel_where_torch_lacks_the_operation(
    device: torch.device,
    dtype: torch.dtype,
    assert_close: AssertClose,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cudnn, "SHORTEST", 16)
    monkeypatch.setattr(cudnn, "plans", cudnn.Plans())
    fail_probe(monkeypatch, CUDNN_ATTENTION)
    with pytest.raises(cudnn.Unserved):
        cudnn.prepare(Geometry(device, dtype, HEADS, KV_HEADS, DIM), DIM**-0.5, 128)
    batch, num_pages = make_batch([], [(0, 128)], device)
    out, _ = run(batch, num_pages, device, dtype, attention)
    expected, _ = run(batch, num_pages, device, torch.float32, attention_reference)
    assert_close(out, expected)


@pytest.mark.gpu
def test_geometry_without_a_plan_is_unserved() -> None:
    with pytest.raises(cudnn.Unserved, match=f"{HEADS} heads over {KV_HEADS} of {DIM} in torch.float32"):
        cudnn.prepare(Geometry(torch.device("cuda"), torch.float32, HEADS, KV_HEADS, DIM), 1.0, 1024)


def test_fault_of_the_device_is_not_taken_for_a_geometry_without_a_plan(
    device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        cudnn.prepare(Geometry(device, dtype, HEADS, KV_HEADS, DIM), 1.0, 1024)
