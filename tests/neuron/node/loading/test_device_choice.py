"""Which devices a model takes, and how many layers each gets of a model in stages."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cortex.neuron.config import Limits, NeuronConfig
from cortex.neuron.engine.memory.reserve import MemoryReserve
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


def choose(
    free_gib: dict[int, int],
    allowed: tuple[int, ...] = (),
    kept: int = 0,
    count: int = 1,
    excluded: dict[int, str] | None = None,
    ceilings: dict[int, int] | None = None,
    left: dict[int, int] | None = None,
) -> tuple[int, ...]:
    """The devices for a model that needs 8 GiB, of cards with 24, 24 and 6 GiB."""
    totals = (24, 24, 6)
    devices = [
        Device(index=index, kind="cuda", name="card", total_bytes=total * GIB) for index, total in enumerate(totals)
    ]
    readings = {index: DeviceReading(24 * GIB, free * GIB) for index, free in free_gib.items()}
    forecast: Any = SimpleNamespace(
        least_bytes=lambda *_: 8 * GIB,
        reserve=lambda _: MemoryReserve(kept * GIB),
        share_bytes=lambda _, device: (ceilings or {}).get(device.index),
    )
    model = KnownModel(id="big", source="/big", tensor_parallel=count, devices=allowed)
    choice = DeviceChoice(
        model, FACTS, devices, readings, forecast, excluded or {}, lambda device: (left or {}).get(device.index)
    )
    return choice.choose().indices


def test_chooses_the_device_with_the_most_free_memory() -> None:
    assert choose({0: 10, 1: 20, 2: 6}) == (1,)
    assert choose({0: 10, 1: 20, 2: 6}, allowed=(0,)) == (0,)
    assert choose({0: 10, 1: 10, 2: 6}) == (0,)


def test_leaves_out_a_device_and_says_why() -> None:
    assert choose({0: 10, 1: 20, 2: 6}, excluded={1: "it has a part of other"}) == (0,)
    with pytest.raises(InsufficientCapacity, match=r"device 1 .*: it has a part of other"):
        choose({0: 10, 1: 20, 2: 6}, excluded={1: "it has a part of other"}, count=2)


def test_chooses_as_many_devices_as_the_model_is_divided_among() -> None:
    assert choose({0: 20, 1: 10, 2: 6}, count=2) == (0, 1)
    with pytest.raises(InsufficientCapacity, match=r"at least 8\.0 GiB on each of 2 devices, but device 1") as rejected:
        choose({0: 20, 1: 7, 2: 6}, count=2)
    assert [row["device"] for row in rejected.value.details["devices"]] == [1, 2]


def test_ceiling_excludes_a_device_and_is_named() -> None:
    empty = {0: 24, 1: 24}
    assert choose(empty, ceilings={0: 7 * GIB}, left={0: 7 * GIB}) == (1,)
    assert choose(empty, ceilings={0: 20 * GIB}, left={0: 10 * GIB, 1: 9 * GIB}) == (0,)
    with pytest.raises(InsufficientCapacity) as rejected:
        choose(empty, ceilings={0: 7 * GIB, 1: 20 * GIB}, left={0: 7 * GIB, 1: 3 * GIB})
    assert [row["reason"] for row in rejected.value.details["devices"]][:2] == [
        "models may take 7.0 GiB of it (memory_mb)",
        "other models take the rest of memory_mb; unload something, or raise it",
    ]


def test_rejection_lists_every_device_with_its_numbers_and_reason() -> None:
    with pytest.raises(InsufficientCapacity) as rejected:
        choose({0: 5, 2: 6}, allowed=(0, 1, 2))
    reasons = [row["reason"] for row in rejected.value.details["devices"]]
    assert reasons == [
        "too little is free; unload something",
        "the device does not respond",
        "too small even when empty",
    ]
    assert "needs at least 8.0 GiB" in rejected.value.message
    assert "device 0 (card) has 5.0 GiB of 24.0 GiB to give" in rejected.value.message


def test_reserved_memory_is_not_used() -> None:
    assert choose({0: 10, 1: 9}, kept=1) == (0,)
    with pytest.raises(
        InsufficientCapacity, match=r"has 7\.0 GiB of 24\.0 GiB to give, in addition to 3\.0 GiB"
    ) as rejected:
        choose({0: 10, 1: 9}, kept=3)
    rows = rejected.value.details["devices"]
    assert [(row["have_bytes"], row["kept_free_bytes"]) for row in rows[:2]] == [
        (7 * GIB, 3 * GIB),
        (6 * GIB, 3 * GIB),
    ]
    with pytest.raises(InsufficientCapacity) as rejected:
        choose({0: 24, 1: 24}, kept=17)
    assert rejected.value.details["devices"][0]["reason"] == "too small even when empty"


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
