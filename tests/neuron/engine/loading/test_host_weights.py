"""A mixture that does not fit its device generates the same tokens with experts in host memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.errors import InsufficientMemory, LoadCancelled, LoadError
from cortex.neuron.engine.host_pages.device_memory import DeviceHostMemory
from cortex.neuron.engine.loading.loading import LoadedModel, build_model, load_model
from cortex.neuron.engine.memory import host_weights
from cortex.neuron.engine.request import EngineRequest, LoadSpec, SamplingParams
from cortex.neuron.kernels.float8.layout import FLOAT8_ROWS
from cortex.neuron.kernels.layouts import DeviceLayout
from cortex.neuron.kernels.moe.host_exchange import ExchangeRule
from cortex.neuron.kernels.moe.host_team import HostRates, HostTeam
from cortex.neuron.kernels.quantised.layout import Q4, Q6, Q8
from cortex.neuron.models.config import UnsupportedModel

from ...engine_runs import response_to
from ...named_weights import fill_by_name, named_weights
from ...tiny_models import tiny_delta, tiny_experts, tiny_sizes, write_checkpoint

CPU = torch.device("cpu")
MIXTURE: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    **tiny_sizes(),
    **tiny_experts(num_experts=12, moe_intermediate_size=32),
}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
ROUTED = {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0, "n_shared_experts": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "qwen3_next": {
        **tiny_delta(),
        "shared_expert_intermediate_size": 40,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "gpt_oss": {"num_local_experts": 12, "intermediate_size": 32, "sliding_window": 8},
    "deepseek_v3": {**ROUTED, **LATENT, "routed_scaling_factor": 2.5},
    "glm4_moe": {"n_routed_experts": 12, "n_shared_experts": 2, "first_k_dense_replace": 0},
    "qwen3": {"num_hidden_layers": 8, "intermediate_size": 128},
    "gemma3_text": {"num_hidden_layers": 8, "intermediate_size": 128, "sliding_window": 8},
}
PROMPT = [5, 17, 3, 40, 22, 9, 61]


_MATRIX = re.compile(r"\.mlp\.(experts\.\d+\.)?(gate|up|down)_proj\.weight$")


class _Layouts(Mapping[str, DeviceLayout]):
    """One layout for all experts, or feed-forward blocks."""

    def __init__(self, layout: DeviceLayout | None) -> None:
        self._layout = layout

    def __getitem__(self, name: str) -> DeviceLayout:
        if self._layout is None or not _MATRIX.search(name):
            raise KeyError(name)
        return self._layout

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _built(family: str, layout: DeviceLayout | None = None, **options: Any) -> tuple[LoadedModel, LoadSpec]:
    config = {"model_type": family, **MIXTURE, **FAMILIES[family]}
    spec = LoadSpec("", dtype="float32", max_num_seqs=4, speculation="off", **options)
    return build_model(config, spec, CPU, fill_by_name, _Layouts(layout)), spec


def _small_bytes(whole: LoadedModel) -> int:
    """A device that has no room for all experts: for about half."""
    return whole.weight_bytes * 6 // 10 + whole.memory.num_bytes // 4


def _tokens(loaded: LoadedModel, spec: LoadSpec) -> list[list[int]]:
    engine = Engine(loaded, spec)
    try:
        found = []
        for number, prompt in enumerate((PROMPT, PROMPT * 3)):
            request = EngineRequest(str(number), prompt, 6, SamplingParams(temperature=0.0))
            found.append(response_to(engine, request)[0])
        return found
    finally:
        engine.close()


WAYS = ("cpu", "stream")


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    rates = HostRates(1e9, 1.0) if request.param == "cpu" else HostRates(1.0, 1e9)
    monkeypatch.setattr(HostTeam, "_measured", lambda _: rates)
    return str(request.param)


@pytest.mark.parametrize("family", FAMILIES)
def test_model_larger_than_its_device_generates_the_tokens_of_one_that_fits(family: str, way: str) -> None:
    whole, spec = _built(family)
    small, small_spec = _built(family, memory_bytes=_small_bytes(whole), host_weight_bytes=1 << 30)
    assert small.host is not None
    assert whole.host is None
    assert small.weight_bytes < whole.weight_bytes * 0.75
    assert small.host.num_bytes > 0.2 * whole.weight_bytes
    assert _tokens(small, small_spec) == _tokens(whole, spec)


@pytest.mark.parametrize(
    ("family", "layout", "way"),
    [
        # Each layout with both families and both ways; kernels/moe/test_hosted.py has every layout in every product.
        pytest.param(family, layout, WAYS[(row + column) % 2], id=f"{family}-{name}")
        for row, (name, layout) in enumerate({"Q4": Q4, "Q6": Q6, "Q8": Q8, "FP8": FLOAT8_ROWS}.items())
        for column, family in enumerate(("qwen3_moe", "qwen3"))
    ],
    indirect=["way"],
)
def test_weights_in_each_format_generate_the_same_tokens(family: str, layout: DeviceLayout, way: str) -> None:
    whole, spec = _built(family, layout)
    small, small_spec = _built(family, layout, memory_bytes=_small_bytes(whole), host_weight_bytes=1 << 30)
    assert small.host is not None
    assert _tokens(small, small_spec) == _tokens(whole, spec)


@pytest.mark.parametrize("stacked", [False, True])
def test_experts_of_a_checkpoint_are_read_into_host_memory(tmp_path: Path, stacked: bool) -> None:
    config = {"model_type": "qwen3_moe", **MIXTURE}
    weights = named_weights(config)
    if stacked:
        weights = _stacked(weights, config["num_experts"])
    path = write_checkpoint(tmp_path, config, weights)
    spec = LoadSpec(str(path), dtype="float32", max_num_seqs=4, speculation="off")
    whole = load_model(spec, CPU, lambda *_: None, lambda: False)
    limited = replace(spec, memory_bytes=_small_bytes(whole), host_weight_bytes=1 << 30)
    small = load_model(limited, CPU, lambda *_: None, lambda: False)
    assert small.host is not None
    assert _tokens(small, spec) == _tokens(whole, spec)


def _stacked(weights: dict[str, torch.Tensor], num_experts: int) -> dict[str, torch.Tensor]:
    """The same with one tensor of all experts of a layer."""
    kept = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    for layer in range(MIXTURE["num_hidden_layers"]):
        name = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([weights[f"{name}.{expert}.{part}_proj.weight"] for expert in range(num_experts)])
            for part in ("gate", "up", "down")
        )
        kept |= {f"{name}.gate_up_proj": torch.cat((gate, up), 1), f"{name}.down_proj": down}
    return kept


def test_model_that_fits_has_nothing_in_host_memory() -> None:
    loaded, _ = _built("qwen3_moe", host_weight_bytes=1 << 30)
    assert loaded.host is None
    assert loaded.team is None


def test_load_that_may_not_take_enough_host_memory_says_how_much_it_needs() -> None:
    whole, _ = _built("qwen3_moe")
    with pytest.raises(LoadError, match=r"of host memory, and .* are allowed"):
        _built("qwen3_moe", memory_bytes=_small_bytes(whole), host_weight_bytes=1 << 10)


def test_host_weights_and_deterministic_are_rejected_together() -> None:
    whole, _ = _built("qwen3_moe")
    with pytest.raises(UnsupportedModel, match="deterministic"):
        _built("qwen3_moe", memory_bytes=_small_bytes(whole), host_weight_bytes=1 << 30, deterministic=True)


def test_host_that_runs_out_of_memory_in_the_middle_of_a_load_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = _built("qwen3_moe")
    released: list[int] = []
    allocate, release = host_weights.HostBuffers.allocate, host_weights.HostBuffers.release
    made: list[host_weights.HostBuffers] = []

    def failing(self: host_weights.HostBuffers, num_bytes: int) -> torch.Tensor:
        made.append(self)
        if len(made) == 3:
            raise InsufficientMemory("no memory")
        return allocate(self, num_bytes)

    def releasing(self: host_weights.HostBuffers) -> None:
        release(self)
        released.append(len(self._buffers))

    monkeypatch.setattr(host_weights.HostBuffers, "allocate", failing)
    monkeypatch.setattr(host_weights.HostBuffers, "release", releasing)
    with pytest.raises(InsufficientMemory):
        _built("qwen3_moe", memory_bytes=_small_bytes(whole), host_weight_bytes=1 << 30)
    assert released == [0]


@pytest.mark.parametrize("fails", ["compiled", "warm_up"])
def test_load_that_ends_after_its_weights_are_read_keeps_no_host_memory(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def cancelled(*_: object) -> None:
        raise LoadCancelled("the load was cancelled")

    monkeypatch.setattr(Engine, fails, cancelled)
    whole, _ = _built("qwen3_moe")
    loaded, spec = _built("qwen3_moe", memory_bytes=_small_bytes(whole), host_weight_bytes=1 << 30)
    assert loaded.host is not None
    assert loaded.host.num_bytes
    with pytest.raises(LoadCancelled):
        Engine.start(loaded, spec, lambda *_: None, lambda: False)
    assert not loaded.host.num_bytes


def test_sleeping_model_wakes_with_its_experts_in_host_memory() -> None:
    whole, _ = _built("qwen3_moe")
    loaded, spec = _built("qwen3_moe", memory_bytes=_small_bytes(whole), host_weight_bytes=1 << 30)
    engine = Engine(loaded, spec, moves_weights=True)
    request = EngineRequest("r", PROMPT, 8, SamplingParams(temperature=0.0))
    before = response_to(engine, request)[0]
    assert loaded.host is not None
    assert engine.sleep() >= loaded.host.num_bytes + loaded.weight_bytes * 0.9
    engine.wake(lambda *_: None)
    assert response_to(engine, request)[0] == before
    engine.close()


def test_experts_stay_in_their_places_between_the_responses_before_and_after_a_sleep() -> None:
    whole, _ = _built("qwen3_moe")
    loaded, spec = _built("qwen3_moe", memory_bytes=_small_bytes(whole), host_weight_bytes=1 << 30)
    engine, team = Engine(loaded, spec, moves_weights=True), loaded.team
    assert team is not None
    team.exchanges.rule = ExchangeRule(every_steps=1, factor=0, least=-1)  # some change in nearly every step
    request = EngineRequest("r", PROMPT, 8, SamplingParams(temperature=0.0))
    before = response_to(engine, request)[0]
    num_before = team.num_exchanges
    assert num_before
    for _ in range(2):
        engine.sleep()
        engine.wake(lambda *_: None)
    assert team.num_exchanges == num_before
    assert response_to(engine, request)[0] == before
    assert team.num_exchanges > num_before
    engine.close()


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3"])
def test_speculation_prefix_cache_and_kept_pages_give_the_tokens_of_a_model_that_fits(family: str) -> None:
    whole, spec = _built(family)
    request = EngineRequest("r", PROMPT * 12, 6, SamplingParams(temperature=0.0))
    engine = Engine(whole, spec)
    expected = response_to(engine, request)[0]
    request = replace(request, prediction=tuple(expected))
    small_bytes = _small_bytes(whole)
    engine.close()
    small, _ = _built(family, memory_bytes=small_bytes, host_weight_bytes=1 << 30)
    assert small.host is not None
    engine = Engine(small, replace(spec, speculation="lookup"), moves_weights=True)
    pages = DeviceHostMemory.on(CPU)
    pages.store.limit(1 << 24)
    engine.keep_pages(pages)
    try:
        assert response_to(engine, request) == (expected, 0)
        found, cached = response_to(engine, request)
        assert found == expected
        assert cached >= 64
        engine.sleep()
        engine.wake(lambda *_: None)  # the device has no page of the prompt now, and host memory has
        found, cached = response_to(engine, request)
        assert found == expected
        assert cached >= 64
        assert engine.stats().drafted_tokens
        assert engine.stats().fetched_tokens
    finally:
        engine.close()
