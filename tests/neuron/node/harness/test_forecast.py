"""The forecast of a model's memory, compared with what the engine takes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from cortex.cli.up.demo import SMOLLM2
from cortex.neuron.config import HarnessSettings, Limits, NeuronConfig, TorchHarness
from cortex.neuron.engine.loading.loading import load_model
from cortex.neuron.engine.memory.host import read_host_memory
from cortex.neuron.engine.memory.plan import ModelSizes
from cortex.neuron.engine.request import LoadSpec
from cortex.neuron.kernels.peer_buffer import BUFFER_BYTES
from cortex.neuron.kernels.quantised.recipes import RECIPES
from cortex.neuron.models.packing import MatrixDevice
from cortex.neuron.models.registry import read_architecture
from cortex.neuron.node.harness.forecast import Forecast
from cortex.neuron.node.inspection_process.preflight import ModelMetadata, inspect
from cortex.neuron.node.library import KnownModel
from cortex.system.cache_folder import cache_folder
from cortex.wire.node.protocol import Device

from ...tiny_models import tiny_delta, tiny_sizes

CPU = torch.device("cpu")
GPU = MatrixDevice("cuda", "bfloat16")
GIB = 1 << 30
SIZES: dict[str, Any] = {
    **tiny_sizes(vocab_size=512, num_hidden_layers=4),
    "eos_token_id": None,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA: dict[str, Any] = tiny_delta()
FAMILIES: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "llama, tied": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)),
    "qwen3_moe": lambda: transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **EXPERTS)),
    "glm4_moe_lite": lambda: transformers.Glm4MoeLiteForCausalLM(
        transformers.Glm4MoeLiteConfig(**SIZES, n_routed_experts=4, moe_intermediate_size=32, kv_lora_rank=32)
    ),
    "qwen3_next": lambda: transformers.Qwen3NextForCausalLM(
        transformers.Qwen3NextConfig(**SIZES, **EXPERTS, **DELTA, shared_expert_intermediate_size=32)
    ),
    "qwen3_5": lambda: transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**SIZES, **DELTA)),
}


def cpu_device(total_bytes: int | None = None) -> Device:
    return Device(index=0, kind="cpu", name="cpu", total_bytes=total_bytes or read_host_memory().total_bytes)


def gpu(total_bytes: int) -> Device:
    return Device(index=0, kind="cuda", name="card", total_bytes=total_bytes)


def forecast(dtype: Literal["auto", "float32"] = "auto", **limits: Any) -> Forecast:
    return Forecast(NeuronConfig(harness=HarnessSettings(torch=TorchHarness(dtype=dtype)), limits=Limits(**limits)))


def model_at(path: Path, memory_bytes: int | None = None) -> KnownModel:
    return KnownModel(id="m", source=str(path), memory_bytes=memory_bytes)


@pytest.mark.parametrize("family", FAMILIES)
def test_forecast_from_headers_equals_what_the_engine_takes(tmp_path: Path, family: str) -> None:
    FAMILIES[family]().save_pretrained(tmp_path)
    loaded = load_model(LoadSpec(str(tmp_path), dtype="float32", max_num_seqs=8), CPU, lambda *_: None, lambda: False)
    expected = forecast("float32", max_num_seqs=8).expected_bytes(model_at(tmp_path), inspect(tmp_path), cpu_device())
    assert expected == loaded.weight_bytes + loaded.memory.num_bytes


def test_stored_copy_of_a_tied_embedding_takes_no_memory(tmp_path: Path) -> None:
    FAMILIES["llama, tied"]().save_pretrained(tmp_path)
    forecaster, weights = forecast("float32", max_num_seqs=8), tmp_path / "model.safetensors"
    expected = forecaster.expected_bytes(model_at(tmp_path), inspect(tmp_path), cpu_device())
    tensors = load_file(weights)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, weights)
    assert forecaster.expected_bytes(model_at(tmp_path), inspect(tmp_path), cpu_device()) == expected
    loaded = load_model(LoadSpec(str(tmp_path), dtype="float32", max_num_seqs=8), CPU, lambda *_: None, lambda: False)
    assert loaded.weight_bytes + loaded.memory.num_bytes == expected


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_engine_accepts_a_model_with_its_least_bytes(tmp_path: Path, family: str) -> None:
    FAMILIES[family]().save_pretrained(tmp_path)
    metadata, rows = inspect(tmp_path), 8
    forecaster = forecast("float32", max_num_seqs=rows)
    least_bytes = forecaster.least_bytes(model_at(tmp_path), metadata, cpu_device())
    loaded = load_model(
        LoadSpec(str(tmp_path), dtype="float32", max_num_seqs=rows, memory_bytes=least_bytes),
        CPU,
        lambda *_: None,
        lambda: False,
    )
    assert loaded.weight_bytes + loaded.memory.num_bytes <= least_bytes
    assert least_bytes <= forecaster.expected_bytes(model_at(tmp_path), metadata, cpu_device())


def test_demo_model_takes_the_forecast_bytes() -> None:
    path = cache_folder() / "models" / SMOLLM2.file_name
    if not path.exists():
        pytest.skip("the demo model is not in the cache; `cortex up --demo` fetches it")
    forecaster, metadata = forecast(), inspect(path)
    loaded = load_model(LoadSpec(str(path)), CPU, lambda *_: None, lambda: False)
    taken = loaded.weight_bytes + loaded.memory.num_bytes
    # The engine measures at load which form is faster; the forecast goes by the processor.
    dtype = str(loaded.dtype).removeprefix("torch.")
    dense_bytes, packed_bytes = (
        ModelSizes.of(metadata.architecture, metadata.storage(MatrixDevice("cpu", dtype, is_coded))).fixed_bytes(
            loaded.context_tokens
        )
        for is_coded in (False, True)
    )
    assert loaded.weight_bytes in (dense_bytes, packed_bytes)
    expected = forecaster.expected_bytes(model_at(path), metadata, cpu_device())
    assert loaded.weight_bytes == dense_bytes or abs(expected - taken) < 0.03 * taken
    assert forecaster.least_bytes(model_at(path), metadata, cpu_device()) < expected


def test_gpu_gives_a_model_a_few_full_contexts_if_free(tmp_path: Path) -> None:
    FAMILIES["llama"]().save_pretrained(tmp_path)
    metadata, forecaster = inspect(tmp_path), forecast(max_num_seqs=8, min_free_vram_mb=0)
    sizes = ModelSizes.of(metadata.architecture, metadata.storage(GPU))
    whole = forecaster.expected_bytes(model_at(tmp_path), metadata, gpu(24 * GIB))
    assert whole == pytest.approx(sizes.weight_bytes + 4 * 8 * sizes.page_bytes, rel=0.03)
    small = gpu(GIB + forecaster.least_bytes(model_at(tmp_path), metadata, gpu(GIB)) + 5 * sizes.page_bytes)
    less = forecaster.expected_bytes(model_at(tmp_path), metadata, small)
    assert sizes.weight_bytes < less < whole
    assert forecaster.expected_bytes(model_at(tmp_path, memory_bytes=less), metadata, gpu(24 * GIB)) <= less
    too_small = gpu(GIB)
    assert forecaster.expected_bytes(model_at(tmp_path), metadata, too_small) == forecaster.least_bytes(
        model_at(tmp_path), metadata, too_small
    )


@pytest.mark.parametrize(
    ("options", "kind", "expected"),
    [
        ({"tensor_parallel": 2}, "cuda", BUFFER_BYTES),
        ({"tensor_parallel": 2}, "cpu", 0),
        ({"pipeline_parallel": 2}, "cuda", 0),
    ],
)
def test_forecast_counts_the_buffer_for_messages_between_ranks(
    tmp_path: Path, options: dict[str, Any], kind: Literal["cuda", "cpu"], expected: int
) -> None:
    FAMILIES["llama"]().save_pretrained(tmp_path)
    metadata, forecaster = inspect(tmp_path, num_ranks=options.get("tensor_parallel", 1)), forecast(min_free_vram_mb=0)
    plain, divided = (KnownModel(id="m", source=str(tmp_path), **each) for each in ({}, options))
    device = Device(index=0, kind=kind, name="device", total_bytes=24 * GIB)
    assert (
        forecaster.least_bytes(divided, metadata, device) - forecaster.least_bytes(plain, metadata, device) == expected
    )
    if kind == "cuda":
        limited = KnownModel(id="m", source=str(tmp_path), memory_bytes=metadata.num_ranks * GIB, **options)
        sizes = ModelSizes.of(metadata.architecture, metadata.storage(GPU))
        taken = forecaster.expected_bytes(limited, metadata, device)
        assert GIB - sizes.page_bytes < taken <= GIB
        assert (taken - expected - sizes.weight_bytes) % sizes.page_bytes == 0


def test_dense_weights_are_forecast_in_every_quantised_form_that_a_gpu_can_give_them(tmp_path: Path) -> None:
    FAMILIES["llama"]().save_pretrained(tmp_path)
    forecaster, devices = forecast(max_num_seqs=8), (gpu(24 * GIB),)
    metadata = inspect(tmp_path)
    found = forecaster.quantised(model_at(tmp_path), metadata, devices)
    dense = forecaster.footprint(model_at(tmp_path), metadata, devices)
    assert set(found) == set(RECIPES)
    least = [found[name].least_bytes for name in ("q4_k", "q5_k", "q6_k", "q8_0")]
    assert least == sorted(set(least))
    assert least[0] < dense.least_bytes
    for name, footprint in found.items():
        assert footprint == forecaster.footprint(model_at(tmp_path), inspect(tmp_path, name), devices)
    assert forecaster.quantised(model_at(tmp_path), inspect(tmp_path, "q4"), devices) == {}


def test_footprint_covers_only_the_allowed_devices(tmp_path: Path) -> None:
    FAMILIES["llama"]().save_pretrained(tmp_path)
    metadata, forecaster = inspect(tmp_path), forecast(max_num_seqs=8)
    tight = Device(index=0, kind="cuda", name="card", total_bytes=GIB + (256 << 20) + 700_000)
    wide = Device(index=1, kind="cuda", name="card", total_bytes=24 * GIB)
    anywhere = forecaster.footprint(model_at(tmp_path), metadata, (tight, wide))
    confined = forecaster.footprint(KnownModel(id="m", source=str(tmp_path), devices=(0,)), metadata, (tight, wide))
    assert anywhere.expected_bytes > confined.expected_bytes
    assert anywhere.least_bytes == confined.least_bytes


def test_reserve_is_the_operators_share_and_the_engines() -> None:
    kept = forecast(min_free_vram_mb=512).reserve(gpu(32 * GIB))
    assert kept.usable_bytes(10 * GIB) == 10 * GIB - 2 * GIB - (512 << 20)
    on_cpu = forecast(min_free_vram_mb=512).reserve(cpu_device(32 * GIB))
    assert on_cpu.usable_bytes(10 * GIB) == 5 * GIB - (512 << 20)
    assert on_cpu.usable_bytes(0) < 0


LONG_MODELS: dict[str, dict[str, Any]] = {
    "full attention": {},
    "windows": {
        "use_sliding_window": True,
        "sliding_window": 1024,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    },
    "recurrent layers": {"model_type": "qwen3_5_text", "num_hidden_layers": 8, **DELTA},
}


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
@pytest.mark.parametrize("named", [None, 20_000])
@pytest.mark.parametrize("family", LONG_MODELS)
def test_load_that_can_take_the_size_of_a_context_gets_that_context(
    family: str, named: int | None, kind: Literal["cuda", "cpu"]
) -> None:
    """And so does one that can take more."""
    config = {**tiny_sizes(vocab_size=512, num_hidden_layers=6, max_position_embeddings=131_072), "model_type": "qwen3"}
    metadata = ModelMetadata(Path("/m"), read_architecture(config | LONG_MODELS[family]))
    model = KnownModel(id="m", source="/m", context_tokens=named)
    device = Device(index=0, kind=kind, name="device", total_bytes=1 << 40)
    forecaster = forecast()
    contexts = forecaster.contexts(model, metadata, device, named or 131_072)
    assert (contexts.full_tokens, contexts.wanted_tokens) == (named or 131_072, named or 32_768)
    assert contexts.sizes[0].num_bytes == forecaster.least_bytes(model, metadata, device)
    for size in contexts.sizes[1:]:
        for more_bytes in (0, 1, 4096, 1 << 20, 10 << 20, 1 << 30, 1 << 38):
            plan = forecaster._plan(model, metadata, device, size.num_bytes + more_bytes, None)  # noqa: SLF001
            assert plan.context_tokens >= size.tokens
        less = forecaster._plan(model, metadata, device, size.num_bytes * 9 // 10, None)  # noqa: SLF001
        assert less.context_tokens < size.tokens, "nor is it much more than needed"


def test_engine_gives_a_model_the_context_that_its_memory_is_for(tmp_path: Path) -> None:
    FAMILIES["llama"]().save_pretrained(tmp_path)
    metadata, forecaster = inspect(tmp_path), forecast("float32", max_num_seqs=8)
    for tokens in (64, 100, 256):
        need_bytes = forecaster.context_bytes(model_at(tmp_path), metadata, cpu_device(), tokens)
        spec = LoadSpec(str(tmp_path), dtype="float32", max_num_seqs=8, memory_bytes=need_bytes)
        assert load_model(spec, CPU, lambda *_: None, lambda: False).context_tokens >= tokens
