import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from faulty_models import CONFIG, write_model
from safetensors.torch import load_file, save_file

from cortex.neuron.engine.memory.plan import ModelSizes
from cortex.neuron.kernels.quantised.recipes import RECIPES
from cortex.neuron.models.packing import MatrixDevice
from cortex.neuron.models.registry import read_architecture
from cortex.neuron.node.inspection_process.preflight import ModelMetadata, inspect, objection, recipe_for
from cortex.neuron.weights.stored import TensorInfo
from cortex.wire.errors import LoadFailed, ModelUnsupported

from ...tiny_models import write_llama

GIB = 1 << 30
HALF = MatrixDevice("cpu", "bfloat16")
FACTS = ModelMetadata(Path("m"), read_architecture(CONFIG))


def test_reads_facts_and_sizes_from_config_and_headers(tmp_path: Path) -> None:
    metadata = inspect(write_model(tmp_path / "m"))
    assert (metadata.family, metadata.context_tokens, metadata.quant) == ("llama", 4096, None)
    (weights,) = (tmp_path / "m").glob("*.safetensors")
    assert 0 <= weights.stat().st_size - (metadata.file_bytes or 0) < 4096, "but for the header"
    whole, short = (
        ModelSizes.of(metadata.architecture, metadata.storage(HALF)),
        ModelSizes.of(metadata.architecture, metadata.storage(HALF), 100),
    )
    assert whole.page_bytes == 32 * 2 * 2 * 2 * 16 * 2  # tokens × bytes × layers × heads × size × (key, value)
    assert (whole.context_tokens, short.context_tokens) == (4096, 100)
    assert whole.ceiling_bytes > short.ceiling_bytes
    doubled = ModelSizes.of(metadata.architecture, metadata.storage(MatrixDevice("cpu", "float32")))
    assert (doubled.page_bytes, doubled.weight_bytes) == (2 * whole.page_bytes, 2 * whole.weight_bytes)


def test_digest_is_that_of_the_content(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    for seed, name in enumerate(("base", "tuned")):
        write_llama(tmp_path / name, seed, **sizes)
    shutil.copytree(tmp_path / "base", tmp_path / "copy")
    base, tuned, copied = (inspect(tmp_path / name).digest for name in ("base", "tuned", "copy"))
    assert base == copied == inspect(tmp_path / "base", num_ranks=2).digest
    assert base != tuned
    weights = load_file(tmp_path / "copy" / "model.safetensors")
    save_file(
        weights | {"model.norm.weight": weights["model.norm.weight"] + 1}, tmp_path / "copy" / "model.safetensors"
    )
    assert base != inspect(tmp_path / "copy").digest


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_digest_tells_tokenizers_and_templates_apart(tmp_path: Path, name: str) -> None:
    write_model(tmp_path / "m")
    digests = set()
    for text in ("", "a" * 300_000, "a" * 200_000 + "b" * 100_000):
        (tmp_path / "m" / name).write_text(text)
        digests.add(inspect(tmp_path / "m").digest)
    assert len(digests) == 3


def test_recurrent_layers_need_states_and_no_pages(tmp_path: Path) -> None:
    delta = {
        "model_type": "qwen3_next",
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
    }
    layers = {"layer_types": ["linear_attention", "full_attention"], **delta}
    found = inspect(write_model(tmp_path / "m", config=layers)), inspect(write_model(tmp_path / "n"))
    hybrid, plain = (ModelSizes.of(metadata.architecture, metadata.storage(HALF)) for metadata in found)
    assert hybrid.page_bytes == plain.page_bytes // 2
    assert (hybrid.slot_bytes, plain.slot_bytes) == (2 * 4 * (2 * 16 + 32) + 4 * 32 * 8, 0)


@pytest.mark.parametrize(
    ("config", "quant", "reason"),
    [
        ({"model_type": "mamba9000"}, None, "has no causal language model of model_type 'mamba9000'"),
        (
            {"model_type": "m9", "auto_map": {"AutoModel": "m.M"}},
            None,
            "the code of its repository is never run",
        ),
        (
            {"model_type": "falcon"},
            None,
            "FalconForCausalLM of the installed transformers .* does not support other att",
        ),
        ({"model_type": "mamba2"}, None, "Mamba2ForCausalLM of the installed transformers .* keeps a recurrent state"),
        ({"model_type": "bart", "is_encoder_decoder": True}, None, "bart is an encoder-decoder model"),
        (
            {"model_type": "llama4_text", "layer_types": ["chunked_attention"] * 2},
            None,
            "type chunked_attention are not",
        ),
        ({"model_type": "phi", "rope_scaling": {"type": "dynamic"}}, None, "rope scaling 'dynamic' is not supported"),
        ({"model_type": 5}, None, "model_type 5 is not supported: is it a model's config"),
        ({"quantization_config": {"quant_method": "hqq"}}, None, r"the weights are quantised \(hqq\)"),
        ({"num_attention_heads": 0}, None, "0 for 'num_attention_heads'"),
        ({"max_position_embeddings": "many"}, None, "'many' for 'max_position_embeddings'"),
        ({"num_hidden_layers": 10**9}, None, "1000000000 layers; at most 1000 are supported"),
        ({"rms_norm_eps": "small"}, None, "'small' for 'rms_norm_eps'; it must be a positive number"),
        ({"model_type": "qwen3", "layer_types": 7}, None, "config is damaged"),
        ({}, "q3_k_m", "cannot be quantised as q3_k_m at load; choose one of q4_k, q5_k, q6_k, q8_0"),
    ],
)
def test_rejects_an_unusable_model_with_a_reason(
    tmp_path: Path, config: dict[str, Any], quant: str | None, reason: str
) -> None:
    with pytest.raises(ModelUnsupported, match=reason) as rejected:
        inspect(write_model(tmp_path / "0a1b2c", config=config), quant, name="org/model")
    assert "org/model" in str(rejected.value)


def test_rejects_damaged_files(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"\xff" * 32)
    with pytest.raises(LoadFailed) as rejected:
        inspect(folder)
    assert rejected.value.code == "files_damaged", "another copy of the files may be loaded"


@pytest.mark.parametrize(
    ("path", "stored", "asked"),
    [
        ("model-Q4_K_M.gguf", "Q4_K", "Q4_K_M"),
        ("model-Q4_K_M.gguf", "Q5_0", "int4"),
        ("model-Q4_K_M.gguf", "Q4_K", "q4_k"),
        ("model.gguf", "Q4_K", "Q4_K_S"),
        ("model.gguf", "Q8_0", "q8_0"),
        ("model.gguf", "Q8_0", "int8"),
        ("model.gguf", "Q6_K", "q6k"),
        ("model.gguf", "Q2_K", "q2k"),
        ("model-Q3_K_L.gguf", "Q3_K", "q3"),
        ("Q3_K_M/model-00001-of-00002.gguf", "Q4_K", "q3km"),
        ("model-F16.gguf", "F16", "F16"),
        ("model.gguf", "F16", "fp16"),
        ("folder", "BF16", "bf16"),
        ("folder", "INT8", "int8"),
        ("folder", "INT4", "q4"),
        ("folder", "FP8", "fp8"),
    ],
)
def test_weights_of_the_requested_quantisation_stay_as_they_are(path: str, stored: str, asked: str) -> None:
    assert recipe_for(Path("/models", path), stored, "m", asked) is None


@pytest.mark.parametrize("spelling", ["q4", "Q4_K_M", "q4km", "int4", "INT4", "4bit", "q4_0"])
@pytest.mark.parametrize(("path", "stored"), [("folder", "BF16"), ("folder", "F32"), ("model-F16.gguf", "F16")])
def test_dense_weights_are_quantised_at_load_as_any_spelling_says(path: str, stored: str, spelling: str) -> None:
    assert recipe_for(Path("/models", path), stored, "m", spelling) is RECIPES["q4_k"]


@pytest.mark.parametrize(
    ("path", "stored", "asked", "reason"),
    [
        ("model-Q4_K_M.gguf", "Q4_K", "q8_0", "m is quantised as q4_k, not as q8_0; name the GGUF of q8_0, or the unq"),
        ("model.gguf", "IQ4_XS", "q8", "m is quantised as iq4_xs, not as q8"),
        ("folder", "FP8", "q4", "m is quantised as fp8, not as q4; name the unquantised model as the source, or omit"),
        (
            "folder",
            "BF16",
            "fp4",
            "m cannot be quantised as fp4 at load; choose one of q4_k, q5_k, q6_k, q8_0, fp8 on GPUs, or",
        ),
        ("model-F16.gguf", "F16", "q2_k", "m cannot be quantised as q2_k at load"),
    ],
)
def test_rejects_another_quantisation_and_says_what_to_do(path: str, stored: str, asked: str, reason: str) -> None:
    with pytest.raises(LoadFailed, match=reason):
        recipe_for(Path("/models", path), stored, "m", asked)


@pytest.mark.parametrize(("quant", "fits"), [("q4", True), ("int8", True), ("fp8", True), ("q2_k", False), ("", False)])
def test_dense_weights_are_not_downloaded_for_a_quantisation_without_a_recipe(quant: str, fits: bool) -> None:
    assert (objection(quant) is None) is fits


def test_packed_matrices_are_counted_in_quantised_bytes_on_a_gpu() -> None:
    gpu = MatrixDevice("cuda", "bfloat16")
    dense = ModelSizes.of(FACTS.architecture, FACTS.storage(gpu)).weight_bytes
    ends = {name: TensorInfo((512, 64), "Q4_K", 0) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    packed = replace(FACTS, tensors=ends)
    assert ModelSizes.of(packed.architecture, packed.storage(gpu)).weight_bytes < dense
    assert ModelSizes.of(packed.architecture, packed.storage(HALF)).weight_bytes == dense, "a CPU keeps them dense"


def test_dense_weights_are_quantised_at_load_by_the_requested_recipe(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m")
    assert inspect(path).recipe is None
    for spelling, name in (("Q4_K_M", "q4_k"), ("int8", "q8_0")):
        metadata = inspect(path, spelling)
        assert (metadata.recipe, metadata.quant) == (RECIPES[name], name)
