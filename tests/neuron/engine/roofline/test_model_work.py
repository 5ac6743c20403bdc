"""What the steps of a model read and compute, counted from its matrices; and the limits of the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.loading.loading import build_model
from cortex.neuron.engine.memory.device_limits import measure_limits
from cortex.neuron.engine.request import LoadSpec
from cortex.neuron.engine.roofline.step_work import StepWork
from cortex.neuron.layers.parameters import Parameters

from ...tiny_models import llama_config, tiny_experts, tiny_sizes

CPU = torch.device("cpu")
SPEC = LoadSpec("", dtype="float32", context_tokens=64, max_num_seqs=2, speculation="off")
ITEM = 4
HIDDEN, INNER, VOCAB, LAYERS, QUERIES, KEYS = 64, 96, 96, 2, 64, 32
ATTENTION = HIDDEN * (2 * QUERIES + 2 * KEYS)
NORMS = (2 * LAYERS + 1) * HIDDEN


def fill(parameters: Parameters) -> None:
    for binding in parameters.bindings:
        binding.destination.zero_()


def work_of(config: dict[str, Any]) -> StepWork:
    work = Engine(build_model(config, SPEC, CPU, fill), SPEC).info.work
    assert work is not None
    return work


@pytest.mark.parametrize("tied", [False, True])
def test_dense_model_reads_all_but_the_embedding(tied: bool) -> None:
    work = work_of(llama_config(tie_word_embeddings=tied))
    layers = LAYERS * (ATTENTION + 3 * HIDDEN * INNER)
    assert work.weight_bytes == ITEM * (layers + NORMS + VOCAB * HIDDEN)
    assert work.experts == ()
    assert work.weights_per_token == pytest.approx(layers, rel=0.01)
    assert work.token_bytes == ITEM * LAYERS * 2 * KEYS
    assert work.attention_width == LAYERS * QUERIES


def test_mixture_reads_the_experts_that_its_rows_select() -> None:
    config = {"model_type": "qwen3_moe", "rms_norm_eps": 1e-6, "rope_theta": 1e4, **tiny_sizes(), **tiny_experts()}
    work = work_of(config | {"decoder_sparse_step": 1, "mlp_only_layers": []})
    (experts,) = work.experts
    expert = 3 * HIDDEN * config["moe_intermediate_size"]
    assert experts.share == pytest.approx(2 / 6)
    assert experts.num_bytes == ITEM * LAYERS * 6 * expert
    assert work.read_bytes(1) == pytest.approx(work.weight_bytes + experts.num_bytes / 3)
    router = 6 * HIDDEN
    assert work.weights_per_token == pytest.approx(LAYERS * (ATTENTION + router + 2 * expert), rel=0.02)


def test_limits_of_a_device_are_rates() -> None:
    limits = measure_limits(CPU, 128 << 20)
    assert limits is not None
    assert limits.bytes_per_s > 0
    assert limits.flops > 0


@pytest.mark.parametrize("free_bytes", [0, 127 << 20])
def test_little_memory_says_nothing_about_a_device(free_bytes: int) -> None:
    assert measure_limits(CPU, free_bytes) is None, "it would be the rate of a cache"
