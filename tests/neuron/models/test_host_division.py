"""Which experts go to host memory, and what that costs."""

from __future__ import annotations

import pytest

from cortex.neuron.models.host_division import (
    NUM_BUFFERS,
    Division,
    LayerWeights,
    Rates,
    buffer_bytes,
    buffer_experts,
    divide,
)

MIB = 1 << 20
LAYERS = [LayerWeights(30 * MIB, 4 * MIB, experts=16, top_k=2)] * 3 + [LayerWeights(50 * MIB)]
OTHER = 20 * MIB
WHOLE = OTHER + sum(layer.dense_bytes + layer.experts * layer.expert_bytes for layer in LAYERS)


def _divided(device_bytes: int, host_bytes: int = 1 << 40, rates: Rates | None = None) -> Division:
    division = divide(LAYERS, OTHER, device_bytes, host_bytes, rates)
    assert isinstance(division, Division)
    return division


def test_model_that_fits_stays_on_the_device() -> None:
    division = _divided(WHOLE)
    assert (division.device_bytes, division.host_bytes, division.moved) == (WHOLE, 0, (0, 0, 0, 0))


@pytest.mark.parametrize("lacking", [1, 10 * MIB, 60 * MIB, 150 * MIB])
def test_as_few_experts_leave_the_device_as_it_lacks_equally_many_of_each_layer(lacking: int) -> None:
    division = _divided(WHOLE - lacking)
    moved = division.moved
    assert division.device_bytes <= WHOLE - lacking < division.device_bytes + 4 * MIB
    assert max(moved[:3]) - min(moved[:3]) <= 1
    assert moved[3] == 0
    assert division.device_bytes == WHOLE - 4 * MIB * sum(moved) + buffer_bytes(LAYERS)
    assert division.host_bytes == 4 * MIB * (sum(moved) + division.num_expert_layers)  # one spare place each


def test_buffers_hold_the_experts_of_each_size_and_one_for_exchanges() -> None:
    mixed = [LAYERS[0], LayerWeights(30 * MIB, 6 * MIB, experts=16, top_k=2), LayerWeights(50 * MIB)]
    assert buffer_bytes(LAYERS) == (NUM_BUFFERS * buffer_experts(LAYERS) + 1) * 4 * MIB
    assert buffer_bytes(mixed) == (NUM_BUFFERS * buffer_experts(mixed) + 1) * (4 + 6) * MIB
    assert buffer_bytes(LAYERS[3:]) == 0


def test_reason_names_what_is_lacking() -> None:
    assert "the device lacks" in str(divide(LAYERS, OTHER, 100 * MIB, 1 << 40))
    assert "of host memory" in str(divide(LAYERS, OTHER, WHOLE - 60 * MIB, 8 * MIB))
    assert "no routed experts" in str(divide([LayerWeights(MIB)] * 4, 0, MIB, 1 << 40, moves_blocks=False))
    assert "none of its weights" in str(divide([LayerWeights(MIB)] * 4, 0, MIB, 1 << 40))


def test_more_in_host_memory_is_expected_to_be_slower_and_faster_rates_faster() -> None:
    little, much = _divided(WHOLE - 10 * MIB), _divided(WHOLE - 100 * MIB)
    assert much.host_read_bytes > little.host_read_bytes > 0
    assert much.decode_tokens_s < little.decode_tokens_s < _divided(WHOLE).decode_tokens_s
    assert much.prompt_tokens_s < little.prompt_tokens_s
    fast = _divided(WHOLE - 100 * MIB, rates=Rates(host=80e9, bus=50e9))
    assert fast.decode_tokens_s > much.decode_tokens_s
    assert fast.prompt_tokens_s > much.prompt_tokens_s
