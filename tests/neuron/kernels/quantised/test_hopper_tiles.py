"""Mixtures of packed experts on a card of Hopper's kind; elsewhere when they are chosen, and how codes are unpacked."""

import re
from dataclasses import replace

import pytest
import torch
from tests.neuron.kernels.conftest import relative_error
from tests.neuron.kernels.moe.test_mixture import with_biases
from tests.neuron.kernels.moe.test_quantised import EPS, dense, random_experts

from cortex.neuron.kernels.moe.mixture import mixture_grouped, mixture_reference
from cortex.neuron.kernels.quantised.hopper import tiles
from cortex.neuron.kernels.quantised.layout import FP4, INT4, IQ4, Q4, Q6, Layout
from cortex.neuron.kernels.quantised.unpack import small_floats_by_half

ON_HOPPER = pytest.mark.usefixtures("on_hopper")
CUDA = torch.device("cuda")


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("layout", [FP4, Q4, IQ4, INT4], ids=["FP4", "Q4", "IQ4", "INT4"])
@pytest.mark.parametrize(("hidden", "inner"), [(128, 64), (192, 416), (2880, 768)])
def test_rows_match_the_reference(layout: Layout, hidden: int, inner: int) -> None:
    plain = random_experts(layout, layout, hidden, inner)
    for tokens, given in ((17, replace(plain, activation="gelu_tanh")), (40, plain), (300, with_biases(plain))):
        if tiles.is_faster(layout, tokens * given.slots, given.num_experts):
            x = torch.randn(tokens, hidden, device=CUDA, dtype=torch.bfloat16)
            weight = torch.rand(hidden, device=CUDA).to(x.dtype)
            assert tiles.takes(x, layout, tokens * given.slots, given.num_experts)
            expected = mixture_reference(x, weight, EPS, dense(given))
            assert relative_error(mixture_grouped(x, weight, EPS, given), expected) < 0.01


@pytest.mark.parametrize(
    ("layout", "num_pairs", "num_experts", "faster"),
    [
        (FP4, 128, 32, False),  # 32 streams of gpt-oss
        (FP4, 192, 32, True),
        (Q4, 1024, 128, False),  # 128 streams of 30B-A3B
        (Q4, 2048, 128, True),
        (Q4, 128, 8, True),
    ],
)
def test_batches_that_fill_tiles_are_faster(layout: Layout, num_pairs: int, num_experts: int, faster: bool) -> None:
    assert tiles.is_faster(layout, num_pairs, num_experts) is faster


def test_other_cards_and_layouts_are_left_to_the_other_kernel() -> None:
    x = torch.zeros(4, 128, dtype=torch.bfloat16)
    assert not tiles.takes(x, FP4, 4096, 32)  # a CPU
    assert not tiles.takes(x, Q6, 4096, 32)
    assert not tiles.takes(x.float(), FP4, 4096, 32)


def registers(word: int) -> list[int]:
    """What the instructions before the scale leave in p0 to p3."""
    values = {"$8": word}
    for name, target, operands in re.findall(r"(shr|mul|and|lop3)[.\w]* (\w+), ([^;]+);", small_floats_by_half()):
        if target.startswith("s"):
            break
        first, *rest = (values[each] if each in values else int(each, 0) for each in operands.split(", "))
        if name == "shr":
            values[target] = first >> rest[0]
        elif name == "mul":
            values[target] = first * rest[0] & 0xFFFFFFFF
        elif name == "and":
            values[target] = first & rest[0]
        else:
            values[target] = first & rest[0] | rest[1]  # 0xEA
    return [values[f"p{number}"] for number in range(4)]


def test_small_floats_are_moved_to_where_bfloat16_has_them() -> None:
    for code in range(16):
        for place in range(8):
            halves = torch.tensor(registers(code << 4 * place)[place % 4], dtype=torch.int64)
            bits = (halves >> 16 * (place // 4)) & 0xFFFF
            value = (bits << 16).to(torch.int32).view(torch.float32).double() * 2.0**127
            assert float(value) == FP4.codebook[code], (code, place)
            assert sum(registers(code << 4 * place)) == int(halves)
