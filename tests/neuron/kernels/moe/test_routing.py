from dataclasses import replace

import pytest
import torch
from tests.neuron.kernels.conftest import AssertClose

from cortex.neuron.kernels.dense.matrix import DenseMatrix
from cortex.neuron.kernels.moe.experts import Experts
from cortex.neuron.kernels.moe.routing import (
    choose_reference,
    choose_rows,
    choose_rows_reference,
    list_pairs,
    list_pairs_reference,
    router_scores,
)
from cortex.neuron.kernels.moe.rule import DEFAULT_RULE, RouterRule

COUNTS = [(8, 2, 0), (128, 8, 0), (5, 5, 0), (20, 4, 3), (1, 1, 1)]
"""Routed experts, experts per token, shared experts."""


RULES = {
    "sigmoid": RouterRule(scoring="sigmoid"),
    "scaled": RouterRule(scale=2.5),
    "shared without a gate": RouterRule(gates_shared=False),
    "some groups": RouterRule("sigmoid", groups=5, kept_groups=3),
    "groups, softmax": RouterRule(groups=4, kept_groups=1),
    "sigmoid, scaled, without a gate": RouterRule("sigmoid", 1.7, gates_shared=False),
}


def make_experts(
    routed: int,
    top_k: int,
    shared: int,
    renormalise: bool,
    device: torch.device,
    hidden: int = 48,
    rule: RouterRule = DEFAULT_RULE,
    *,
    biased: bool = False,
) -> Experts:
    router = torch.randn(routed + (shared > 0 and rule.gates_shared), hidden, device=device)
    unused = torch.empty(routed + shared, 2, hidden, device=device)
    bias = torch.randn(routed, device=device) if biased else None
    gate_up, down = DenseMatrix(unused.flatten(0, 1)), DenseMatrix(unused.mT[..., :1].flatten(0, 1))
    return Experts(router, gate_up, down, top_k, renormalise, shared, rule=rule, bias=bias)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_choice_by_other_rules_matches_the_reference(
    rule: str, renormalise: bool, biased: bool, device: torch.device, assert_close: AssertClose
) -> None:
    experts = make_experts(20, 4, 3, renormalise, device, rule=RULES[rule], biased=biased)
    hidden, norm = torch.randn(3, 48, device=device), torch.rand(48, device=device) * 0.3
    choice, reference = (choose(hidden, norm, 1e-6, experts) for choose in (choose_rows, choose_rows_reference))
    assert torch.equal(choice.experts, reference.experts)
    assert_close(choice.weights, reference.weights)
    logits = torch.randn(21, len(experts.router), device=device)
    lists, expected = list_pairs(logits, experts), list_pairs_reference(logits, experts)
    assert torch.equal(lists.counts, expected.counts)
    assert_close(lists.weights, expected.weights)


def test_bias_moves_the_choice_and_not_the_weights() -> None:
    experts = make_experts(4, 1, 0, False, torch.device("cpu"), rule=RouterRule("sigmoid", scale=2.0))
    logits = torch.tensor([[3.0, 0.0, -1.0, 2.0]])
    biased = replace(experts, bias=torch.tensor([-1.0, 0.0, 0.0, 0.5]))
    for experts_, chosen in ((experts, 0), (biased, 3)):
        choice = choose_reference(logits, experts_)
        assert choice.experts.tolist() == [[chosen]]
        torch.testing.assert_close(choice.weights, 2 * logits[:, chosen : chosen + 1].sigmoid())


def test_factors_of_experts_and_a_norm_of_the_router_match_the_reference(
    device: torch.device, assert_close: AssertClose
) -> None:
    plain = make_experts(20, 4, 3, True, device)
    scales = torch.rand(20, device=device)
    experts = replace(plain, scales=scales, router_norm=torch.randn(48, device=device))
    hidden, norm = torch.randn(3, 48, device=device), torch.rand(48, device=device) * 0.3
    choice, reference = (choose(hidden, norm, 1e-6, experts) for choose in (choose_rows, choose_rows_reference))
    assert torch.equal(choice.experts, reference.experts)
    assert_close(choice.weights, reference.weights)
    logits = torch.randn(21, len(experts.router), device=device)
    assert_close(list_pairs(logits, experts).weights, list_pairs_reference(logits, experts).weights)
    unscaled, scaled = choose_reference(logits, plain), choose_reference(logits, experts)
    routed = unscaled.experts[:, :4]
    assert_close(scaled.weights[:, :4], unscaled.weights[:, :4] * scales[routed])
    assert torch.equal(scaled.weights[:, 4:], unscaled.weights[:, 4:])


@pytest.mark.parametrize(("routed", "top_k", "shared"), COUNTS)
@pytest.mark.parametrize("renormalise", [True, False])
def test_small_batch_choice_matches_the_reference(
    routed: int, top_k: int, shared: int, renormalise: bool, device: torch.device, assert_close: AssertClose
) -> None:
    experts = make_experts(routed, top_k, shared, renormalise, device)
    hidden, norm = torch.randn(3, 48, device=device), torch.rand(48, device=device) * 0.3
    for _ in range(2):  # the second run uses the counters that the first one reset
        choice = choose_rows(hidden, norm, 1e-6, experts)
        reference = choose_rows_reference(hidden, norm, 1e-6, experts)
        assert torch.equal(choice.experts, reference.experts)
        assert_close(choice.weights, reference.weights)


@pytest.mark.parametrize(("routed", "top_k", "shared"), COUNTS)
@pytest.mark.parametrize("tokens", [1, 21])
def test_pair_lists_match_the_reference(
    routed: int, top_k: int, shared: int, tokens: int, device: torch.device, assert_close: AssertClose
) -> None:
    experts = make_experts(routed, top_k, shared, True, device)
    logits = torch.randn(tokens, len(experts.router) + 3, device=device)[:, : len(experts.router)]
    lists, reference = list_pairs(logits, experts), list_pairs_reference(logits, experts)
    assert torch.equal(lists.counts, reference.counts)
    assert_close(lists.weights, reference.weights)
    for members, expected, count in zip(lists.members, reference.members, lists.counts.tolist(), strict=True):
        assert sorted(members[:count].tolist()) == expected[:count].tolist()


def test_rows_after_the_router_do_not_count(device: torch.device, assert_close: AssertClose) -> None:
    experts = make_experts(12, 3, 1, True, device)
    aligned = torch.cat((experts.router, torch.full((3, 48), torch.nan, device=device)))
    x = torch.randn(5, 48, device=device)
    scores = router_scores(x, replace(experts, aligned_router=aligned))
    assert_close(scores, router_scores(x, experts))
    lists, reference = list_pairs(scores, experts), list_pairs_reference(scores, experts)
    assert torch.equal(lists.counts, reference.counts)
    assert_close(lists.weights, reference.weights)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), 7.0])
def test_chooses_distinct_valid_experts_for_degenerate_scores(bad: float, device: torch.device) -> None:
    experts = make_experts(11, 4, 1, True, device)
    lists = list_pairs(torch.full((3, 12), bad, device=device), experts)
    assert lists.counts.sum() == 3 * experts.slots
    assert lists.counts.max() <= 3


def test_weights_sum_to_one_only_with_renormalisation() -> None:
    logits = torch.randn(4, 6)
    kept = choose_reference(logits, make_experts(6, 2, 0, False, torch.device("cpu")))
    scaled = choose_reference(logits, make_experts(6, 2, 0, True, torch.device("cpu")))
    assert (kept.weights.sum(1) < 1).all()
    torch.testing.assert_close(scaled.weights.sum(1), torch.ones(4))
    torch.testing.assert_close(scaled.weights[:, 0] / scaled.weights[:, 1], kept.weights[:, 0] / kept.weights[:, 1])
