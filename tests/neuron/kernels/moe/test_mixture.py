import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.neuron.kernels.conftest import AssertClose

from cortex.neuron.kernels.dense.matrix import DenseMatrix
from cortex.neuron.kernels.moe.experts import Experts
from cortex.neuron.kernels.moe.mixture import (
    mixture,
    mixture_grouped,
    mixture_of_rows,
    mixture_reference,
    takes_single_pairs,
)
from cortex.neuron.kernels.moe.routing import choose_reference

EPS = 1e-6
Mixture = Callable[..., torch.Tensor]


def random_experts(
    shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype, *, top_k: int, renormalise: bool
) -> Experts:
    """`shape`: hidden, inner, routed experts, shared experts."""
    hidden, inner, routed, shared = shape

    def random(*size: int) -> torch.Tensor:
        scale: float = size[-1] ** -0.5
        return torch.randn(*size, device=device, dtype=dtype) * scale

    return Experts(
        random(routed + bool(shared), hidden) * 3,
        DenseMatrix(random((routed + shared) * 2 * inner, hidden)),
        DenseMatrix(random((routed + shared) * hidden, inner)),
        num_shared=shared,
        top_k=top_k,
        renormalise=renormalise,
    )


def with_biases(experts: Experts) -> Experts:
    """The same experts with biases and a clamped activation, as gpt-oss has them."""
    counts = (len(experts.router), experts.gate_up.outputs, experts.down.outputs)
    like = experts.router
    router, gate_up, down = (torch.randn(count, device=like.device, dtype=like.dtype) for count in counts)
    return dataclasses.replace(
        experts, activation="clamped_swiglu", router_bias=router, gate_up_bias=gate_up, down_bias=down
    )


def exact(experts: Experts) -> Experts:
    """The same experts in float32."""
    gate_up, down = (DenseMatrix(matrix.values().float()) for matrix in (experts.gate_up, experts.down))
    names = ("router", "router_bias", "gate_up_bias", "down_bias")
    wide: dict[str, Any] = {name: value.float() for name in names if (value := getattr(experts, name)) is not None}
    return dataclasses.replace(experts, gate_up=gate_up, down=down, **wide)


def stacks(experts: Experts) -> list[torch.Tensor]:
    """The weights of gate and up, and of down, by expert."""
    matrices, num_experts = (experts.gate_up, experts.down), experts.num_held + experts.num_shared
    return [matrix.values().unflatten(0, (num_experts, -1)) for matrix in matrices]


def rows_with_clear_routing(count: int, norm: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Random rows whose routing does not depend on rounding: a clear margin after the last selected expert."""
    hidden = torch.randn(20 * count, len(norm), device=norm.device, dtype=norm.dtype)
    x = torch.nn.functional.rms_norm(hidden.float(), hidden.shape[-1:], norm.float(), EPS)
    scores = x @ experts.router[: experts.num_routed].float().t()
    if experts.router_bias is not None:
        scores += experts.router_bias[: experts.num_routed].float()
    scores = scores.sort(descending=True).values
    if experts.top_k < experts.num_routed:
        hidden = hidden[scores[:, experts.top_k - 1] - scores[:, experts.top_k] > 0.1]
    assert len(hidden) >= count
    return hidden[:count]


def mixture_by_definition(hidden: torch.Tensor, norm: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Token by token, expert by expert, by definition."""
    x = torch.nn.functional.rms_norm(hidden, hidden.shape[-1:], norm, EPS)
    out = hidden.clone()
    gate_up, down = stacks(experts)
    choice = choose_reference(x @ experts.router.t(), experts)
    for token, (chosen, weights) in enumerate(zip(choice.experts.tolist(), choice.weights, strict=True)):
        for expert, weight in zip(chosen, weights, strict=True):
            gate, up = (x[token] @ gate_up[expert].t()).chunk(2)
            out[token] += weight * ((torch.nn.functional.silu(gate) * up) @ down[expert].t())
    return out


def test_biases_and_clamps_are_where_the_definition_has_them() -> None:
    torch.manual_seed(0)
    experts = with_biases(random_experts((36, 20, 5, 0), torch.device("cpu"), torch.float32, top_k=2, renormalise=True))
    assert experts.router_bias is not None
    assert experts.gate_up_bias is not None
    assert experts.down_bias is not None
    hidden, norm = 20 * torch.randn(3, 36), torch.randn(36)
    x = torch.nn.functional.rms_norm(hidden, (36,), 5 * norm, EPS)
    expected = hidden.clone()
    for token in range(3):
        scores, chosen = (experts.router @ x[token] + experts.router_bias).topk(2)
        for weight, expert in zip(scores.softmax(0), chosen.tolist(), strict=True):
            gate_up, down = (stack[expert] for stack in stacks(experts))
            gate, up = (gate_up @ x[token] + experts.gate_up_bias.view(5, -1)[expert]).chunk(2)
            gate, up = gate.clamp(max=7), up.clamp(-7, 7)
            inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            expected[token] += weight * (down @ inner + experts.down_bias.view(5, -1)[expert])
    torch.testing.assert_close(mixture_reference(hidden, 5 * norm, EPS, experts), expected)


SHAPES = [(64, 32, 8, 0), (36, 20, 5, 0), (20, 17, 12, 2), (33, 24, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("tokens", [1, 9])
def test_reference_matches_the_definition(shape: tuple[int, int, int, int], renormalise: bool, tokens: int) -> None:
    torch.manual_seed(0)
    experts = random_experts(shape, torch.device("cpu"), torch.float32, top_k=min(3, shape[2]), renormalise=renormalise)
    hidden, norm = torch.randn(tokens, shape[0]), torch.randn(shape[0])
    torch.testing.assert_close(
        mixture_reference(hidden, norm, EPS, experts), mixture_by_definition(hidden, norm, experts)
    )


@pytest.mark.parametrize(("shape", "top_k"), [((20, 10, 8, 0), 3), ((24, 17, 12, 2), 5), ((33, 24, 1, 1), 1)])
@pytest.mark.parametrize(("run", "tokens"), [(mixture_of_rows, 2), (mixture_grouped, 37)])
@pytest.mark.parametrize("is_biased", [False, True])
def test_small_and_large_batches_match_the_reference(
    run: Mixture,
    tokens: int,
    is_biased: bool,
    shape: tuple[int, int, int, int],
    top_k: int,
    device: torch.device,
    dtype: torch.dtype,
    assert_close: AssertClose,
) -> None:
    experts = random_experts(shape, device, dtype, top_k=top_k, renormalise=True)
    experts = with_biases(experts) if is_biased else experts
    norm = torch.randn(shape[0], device=device, dtype=dtype)
    hidden = rows_with_clear_routing(tokens, norm, experts)
    reference = mixture_reference(hidden.float(), norm.float(), EPS, exact(experts))
    assert_close(run(hidden, norm, EPS, experts), reference)


@pytest.mark.parametrize("tokens", [1, 37])
def test_experts_without_gates_match_the_definition(
    tokens: int, device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    """The shared expert too, in small and in large batches."""
    gated = random_experts((24, 16, 6, 1), device, dtype, top_k=3, renormalise=True)
    up = DenseMatrix(gated.gate_up.values().unflatten(0, (7, 2, 16))[:, 1].flatten(0, 1).contiguous())
    experts = dataclasses.replace(gated, gate_up=up, gated=False)
    norm = torch.randn(24, device=device, dtype=dtype)
    hidden = rows_with_clear_routing(tokens, norm, experts)
    x = torch.nn.functional.rms_norm(hidden.float(), (24,), norm.float(), EPS)
    choice = choose_reference(x @ experts.router.float().t(), experts)
    matrices = [stack.float() for stack in stacks(experts)]
    inner = torch.einsum("th,eih->tei", x, matrices[0]).relu().square()
    every = torch.einsum("tei,ehi->teh", inner, matrices[1])
    chosen = every.gather(1, choice.experts.long()[..., None].expand(-1, -1, 24))
    expected = hidden.float() + (chosen * choice.weights[..., None]).sum(1)
    assert_close(mixture(hidden, norm, EPS, experts), expected)
    assert_close(mixture_reference(hidden.float(), norm.float(), EPS, exact(experts)), expected)


def held(experts: Experts, first: int, count: int) -> Experts:
    """What a rank of a divided model has of `experts`: some routed ones, and all shared ones."""
    parts = (slice(first, first + count), slice(experts.num_routed, experts.num_experts))
    gate_up, down = (DenseMatrix(torch.cat([stack[part] for part in parts]).flatten(0, 1)) for stack in stacks(experts))
    return dataclasses.replace(experts, gate_up=gate_up, down=down, first=first)


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize(("run", "tokens"), [(mixture_of_rows, 2), (mixture_grouped, 37), (mixture_reference, 5)])
def test_parts_of_a_divided_mixture_add_up_to_the_whole(
    run: Mixture, tokens: int, shared: int, device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    experts = random_experts((24, 17, 7, shared), device, dtype, top_k=3, renormalise=True)
    norm = torch.randn(24, device=device, dtype=dtype)
    hidden = rows_with_clear_routing(tokens, norm, experts)
    nothing = torch.zeros_like(hidden)
    # The shared experts are on both ranks here, so they count twice.
    first, second = (run(hidden, norm, EPS, held(experts, *part), nothing) for part in ((0, 3), (3, 4)))
    alone = run(hidden, norm, EPS, held(experts, 0, 0), nothing) if shared else nothing
    assert_close(
        first + second - alone, mixture_reference(hidden.float(), norm.float(), EPS, exact(experts), nothing.float())
    )


@pytest.mark.parametrize(("run", "tokens"), [(mixture_of_rows, 3), (mixture_grouped, 20)])
def test_nan_row_does_not_affect_other_rows(
    run: Mixture, tokens: int, device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    experts = random_experts((16, 8, 6, 1), device, dtype, top_k=2, renormalise=True)
    norm = torch.ones(16, device=device, dtype=dtype)
    hidden = rows_with_clear_routing(tokens, norm, experts)
    hidden[1] = float("nan")
    finite = [token for token in range(tokens) if token != 1]
    out = run(hidden, norm, EPS, experts)
    assert out[1].isnan().all()
    assert_close(out[finite], mixture_reference(hidden[finite].float(), norm.float(), EPS, exact(experts)))


@pytest.mark.gpu
@pytest.mark.parametrize(("run", "tokens"), [(mixture_of_rows, 1), (mixture_of_rows, 8), (mixture_grouped, 300)])
def test_captured_graph_replays_give_equal_results(
    run: Mixture, tokens: int, device: torch.device, dtype: torch.dtype
) -> None:
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    experts = random_experts((512, 256, 32, 1), device, dtype, top_k=4, renormalise=True)
    norm = torch.ones(512, device=device, dtype=dtype)
    hidden = torch.randn(tokens, 512, device=device, dtype=dtype)
    run(hidden, norm, EPS, experts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(hidden, norm, EPS, experts)
    hidden.normal_()
    expected = run(hidden, norm, EPS, experts)
    for _ in range(50):
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("top_k", "num_experts", "max_reads", "most_rows"),
    [(4, 32, 1.3, 5), (8, 128, 1.3, 9), (8, 128, 1.15, 5), (10, 512, 1.3, 12), (2, 8, 1.6, 4), (1, 1, 1.3, 1)],
)
def test_pairs_are_single_while_few_share_an_expert(
    top_k: int, num_experts: int, max_reads: float, most_rows: int
) -> None:
    single = [rows for rows in range(1, 100) if takes_single_pairs(rows, top_k, num_experts, max_reads)]
    assert single == list(range(1, most_rows + 1))
