"""Few rows with packed experts on a card of Hopper's kind; elsewhere when they are multiplied by it."""

from dataclasses import replace

import pytest
import torch
from tests.neuron.kernels.conftest import relative_error
from tests.neuron.kernels.moe.test_mixture import with_biases
from tests.neuron.kernels.moe.test_quantised import EPS, dense, random_experts

from cortex.neuron.kernels.expert_pairs import PairLists
from cortex.neuron.kernels.moe.mixture import mixture_grouped, mixture_of_rows, mixture_reference
from cortex.neuron.kernels.quantised import matrix as matrix_module
from cortex.neuron.kernels.quantised.hopper import streams
from cortex.neuron.kernels.quantised.layout import FP4, Q4
from cortex.neuron.kernels.quantised.matrix import PackedMatrix

CUDA = torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(("hidden", "inner"), [(128, 64), (416, 2880)])
def test_rows_match_the_reference(hidden: int, inner: int) -> None:
    plain = random_experts(FP4, FP4, hidden, inner)
    assert isinstance(plain.down, PackedMatrix)
    for given in (replace(with_biases(plain), activation="clamped_swiglu"), replace(plain, top_k=4)):
        for tokens in (1, 2, 3, 7, 19):  # up to 19 pairs of an expert
            x = torch.randn(tokens, hidden, device=CUDA, dtype=torch.bfloat16)
            weight = torch.rand(hidden, device=CUDA).to(x.dtype)
            assert streams.takes(x, plain.down.codes)
            expected = mixture_reference(x, weight, EPS, dense(given))
            assert relative_error(mixture_of_rows(x, weight, EPS, given), expected) < 0.01
            assert relative_error(mixture_grouped(x, weight, EPS, given), expected) < 0.01


def test_lists_are_not_streamed_by_a_kernel_that_follows_their_maker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts without gates: the first product has no activation, and the kernel before it makes the lists."""
    streamed: list[int] = []
    monkeypatch.setattr(streams, "takes", lambda *_: True)
    monkeypatch.setattr(streams, "lists_product", lambda *_, **given: streamed.append(given["pairs_per_row"]))
    monkeypatch.setattr(matrix_module, "packed_grouped_product", lambda *_, **given: None)
    matrix = PackedMatrix(FP4, 8, 128, torch.device("cpu"))
    lists = PairLists(*(torch.zeros(1, 1),) * 3)
    for pairs_per_row, activation in ((4, None), (4, "silu"), (1, None)):
        matrix.grouped(lists.weights, lists, lists.weights, pairs_per_row=pairs_per_row, activation=activation, load=1)
    assert streamed == [4, 1]


def test_other_cards_and_layouts_are_left_to_the_other_kernels() -> None:
    x = torch.zeros(1, 128, dtype=torch.bfloat16)
    for layout in (FP4, Q4):
        matrix = PackedMatrix(layout, 8, 128, torch.device("cpu"))
        assert not streams.takes(x, matrix.codes)  # a CPU
        assert not streams.takes(x.float(), matrix.codes)
