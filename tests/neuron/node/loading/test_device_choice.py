"""Which devices a model in stages takes, and how many layers each gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cortex.neuron.config import Limits, NeuronConfig
from cortex.neuron.models.registry import read_architecture
from cortex.neuron.node.harness.forecast import Forecast
from cortex.neuron.node.inspection_process.preflight import ModelMetadata
from cortex.neuron.node.library import KnownModel
from cortex.neuron.node.loading.device_choice import DeviceChoice
from cortex.neuron.node.memory.allocation import ChosenDevices
from cortex.neuron.worker.discovery import DeviceReading
from cortex.wire.errors import InsufficientCapacity, LoadFailed, ModelUnsupported
from cortex.wire.node.protocol import Device

GIB = 1 << 30
CONFIG = {  # 13.8 GiB in bfloat16, of which embedding and head take 2.3
    "model_type": "qwen3",
    "vocab_size": 150_000,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
}
FACTS = ModelMetadata(Path("/m"), read_architecture(CONFIG))
CARD = Device(index=0, kind="cuda", name="card", total_bytes=24 * GIB)
FORECAST = Forecast(NeuronConfig(limits=Limits(max_num_seqs=8, min_free_vram_mb=0)))


def chosen(
    free_gib: list[float], total_gib: list[float] | None = None, metadata: ModelMetadata = FACTS, **options: Any
) -> ChosenDevices:
    totals = total_gib or free_gib
    devices = [
        Device(index=index, kind="cuda", name=f"card {index}", total_bytes=int(total * GIB))
        for index, total in enumerate(totals)
    ]
    readings = {
        index: DeviceReading(int(total * GIB), int(free * GIB))
        for index, (total, free) in enumerate(zip(totals, free_gib, strict=True))
    }
    settings: dict[str, Any] = {"pipeline_parallel": 2, **options}
    model = KnownModel(id="m", source="/m", **settings)
    return DeviceChoice(model, metadata, devices, readings, FORECAST).choose()


def layers(found: ChosenDevices) -> list[int]:
    return [stage.num_layers for stage in found.stages]


@pytest.mark.parametrize(
    ("free_gib", "options", "indices", "expected"),
    [
        ([24, 24], {}, (0, 1), [14, 18]),
        ([24, 12], {}, (0, 1), [20, 12]),
        ([12, 24], {}, (0, 1), [7, 25]),
        ([12, 8, 24], {}, (0, 2), [7, 25]),  # the two with the most free memory
        ([12, 8, 24], {"pipeline_parallel": 3}, (0, 1, 2), [5, 6, 21]),
        ([24, 12, 24, 16], {"devices": (1, 3)}, (1, 3), [11, 21]),
        ([24, 12, 24, 12], {"replicas": 2}, (0, 1, 2, 3), [20, 12]),
    ],
)
def test_layers_go_to_the_devices_with_the_most_free_memory(
    free_gib: list[float], options: dict[str, Any], indices: tuple[int, ...], expected: list[int]
) -> None:
    found = chosen(free_gib, **options)
    assert found.indices == indices
    assert layers(found) == expected
    assert [stage.first_layer for stage in found.stages] == [sum(expected[:rank]) for rank in range(len(expected))]


def test_every_stage_has_the_memory_for_weights_and_a_few_contexts() -> None:
    for stage, total in zip(chosen([24, 12]).stages, (24, 12), strict=True):
        assert stage.memory_bytes is not None
        assert 0.3 * total * GIB < stage.memory_bytes < total * GIB


def test_operators_limit_is_divided_among_the_stages() -> None:
    found = chosen([24, 24], memory_bytes=16 * GIB)
    limits = [stage.memory_bytes for stage in found.stages if stage.memory_bytes is not None]
    assert len(limits) == len(found.stages)
    assert sum(limits) <= 16 * GIB
    with pytest.raises(LoadFailed, match=r"may take 10\.0 GiB \(memory_mb\)"):
        chosen([24, 24], memory_bytes=10 * GIB)


@pytest.mark.parametrize(
    ("free_gib", "total_gib", "reason"),
    [
        ([7, 7], [7, 7], "too small even when empty, or under memory_mb"),
        ([8, 6], [24, 24], "too little is free; unload something"),
        ([3, 24], [3, 24], "too small even when empty, or under memory_mb"),  # the first holds embedding and head
    ],
)
def test_rejects_a_model_that_no_division_fits_with_the_memory_of_each_device(
    free_gib: list[float], total_gib: list[float], reason: str
) -> None:
    with pytest.raises(InsufficientCapacity) as caught:
        chosen(free_gib, total_gib)
    assert "for its 32 layers on 2 devices" in caught.value.message
    assert [row["reason"] for row in caught.value.details["devices"]] == [reason] * 2


def test_ceilings_of_devices_decide_like_their_free_memory() -> None:
    devices = [Device(index=index, kind="cuda", name="card", total_bytes=24 * GIB) for index in range(2)]
    readings = {index: DeviceReading(24 * GIB, 24 * GIB) for index in range(2)}
    model = KnownModel(id="m", source="/m", pipeline_parallel=2)
    left = {0: None, 1: 9 * GIB}
    found = DeviceChoice(model, FACTS, devices, readings, FORECAST, left=lambda device: left[device.index]).choose()
    assert layers(found)[0] > layers(found)[1]
    assert found.stages[1].memory_bytes is not None
    assert found.stages[1].memory_bytes <= 9 * GIB


def test_rejects_stages_of_a_model_that_a_library_runs() -> None:
    metadata = ModelMetadata(Path("/m"), read_architecture(CONFIG | {"model_type": "gpt_neox"}))
    with pytest.raises(ModelUnsupported, match=r"m cannot be divided by layers, because .* library runs it"):
        chosen([24, 24], metadata=metadata)
    assert FORECAST.empty_stages(KnownModel(id="m", source="/m", pipeline_parallel=2), metadata, [CARD] * 2) is None


def test_rejects_more_stages_than_layers_by_name() -> None:
    with pytest.raises(ModelUnsupported, match="m has 32 layers, too few for pipeline_parallel = 33"):
        chosen([24] * 33, pipeline_parallel=33)


@pytest.mark.parametrize(
    ("num_layers", "advice"), [(2, "use tensor_parallel, or one device"), (3, "at most 2 are possible")]
)
def test_rejects_stages_between_layers_that_share_keys_and_values(num_layers: int, advice: str) -> None:
    sharing = {
        "num_hidden_layers": num_layers,
        "num_kv_shared_layers": 1,
        "layer_types": ["full_attention"] * num_layers,
    }
    gemma = {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "sliding_window": 512}
    metadata = ModelMetadata(Path("/m"), read_architecture({**CONFIG, **gemma, **sharing}))
    with pytest.raises(ModelUnsupported, match=f"share keys and values .* {advice}"):
        chosen([24] * num_layers, metadata=metadata, pipeline_parallel=num_layers)
    if num_layers > 2:
        assert len(chosen([24, 24], metadata=metadata).stages) == 2


@pytest.mark.parametrize(("free_gib", "options"), [([16.2], {"pipeline_parallel": 1}), ([8.6, 8.6], {})])
def test_context_that_a_load_asks_for_must_fit(free_gib: list[float], options: dict[str, Any]) -> None:
    """Next to the weights of 13.8 GiB, 8,192 tokens take 1 GiB; 1.5 GiB of each card stay free."""
    total_gib = [24.0] * len(free_gib)
    assert chosen(free_gib, total_gib, min_context_tokens=512, **options).indices
    with pytest.raises(InsufficientCapacity, match="for a context of 8,192 tokens"):
        chosen(free_gib, total_gib, min_context_tokens=8192, **options)
