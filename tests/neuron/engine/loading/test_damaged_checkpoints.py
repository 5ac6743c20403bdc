"""A damaged checkpoint loads correctly or fails with a LoadError: never another error, and nothing stays open.

What `make fuzz` has found is kept as `@example`s.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.neuron.models.gguf_builds import reference_of
from tests.neuron.models.gguf_models import write_gguf

from cortex.neuron.engine.errors import LoadError
from cortex.neuron.engine.loading.loading import load_model
from cortex.neuron.engine.request import LoadSpec

from ...tiny_models import tiny_sizes

CPU = torch.device("cpu")
ODD_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 3, 4, 7, 31, 1 << 31, 1 << 62, 0.5, float("nan"), "", "4", "gemm", "gptq_v2", "float"]),
    st.lists(st.sampled_from([0, -1, 16, 128, 1 << 40, None, "x"]), max_size=3),
    st.dictionaries(st.sampled_from(["num_bits", "block_structure", "weights", "strategy"]), st.integers(-1, 9)),
)


def load_or_reject(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    spec = LoadSpec(str(path), dtype="float32", context_tokens=64, max_num_seqs=1, memory_bytes=1 << 28)
    try:
        load_model(spec, CPU, lambda *_: None, lambda: False)
    except LoadError:
        pass
    assert len(os.listdir("/proc/self/fd")) <= before, "files of earlier tests may have been closed meanwhile"


def tiny_gguf(path: Path) -> None:
    reference = reference_of("qwen35moe", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    write_gguf(path, "qwen35moe", reference, ("Q8_0", "Q4_K", "F16"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    tiny_gguf(path)
    return path


HEADER_BYTES = 8 << 10
"""About; random bytes are mostly written here."""
Patch = tuple[int, bytes]


@given(
    patches=st.lists(
        st.tuples(
            st.one_of(st.integers(0, HEADER_BYTES), st.integers(0, 1 << 24)),
            st.one_of(st.binary(min_size=1, max_size=4), st.sampled_from([b"\xff" * 8, b"\0" * 8])),
        ),
        min_size=1,
        max_size=3,
    ),
    length=st.one_of(st.none(), st.integers(0, 1 << 24)),
)
def test_gguf_with_random_bytes(tiny: Path, patches: list[Patch], length: int | None) -> None:
    raw = bytearray(tiny.read_bytes())
    for position, patch in patches:
        at = position % (len(raw) - len(patch))
        raw[at : at + len(patch)] = patch
    if length is not None:
        del raw[length % len(raw) :]
    damaged = tiny.with_name("damaged.gguf")
    damaged.write_bytes(raw)
    load_or_reject(damaged)


COUNTS = (
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "block_count",
    "context_length",
    "embedding_length",
    "expert_count",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "expert_used_count",
    "full_attention_interval",
    "rope.dimension_count",
    "ssm.conv_kernel",
    "ssm.group_count",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.time_step_rank",
)
SOME_COUNTS = st.one_of(st.integers(0, 1 << 10), st.sampled_from([1 << 16, 1 << 24, (1 << 31) - 1, (1 << 32) - 1]))


@given(counts=st.dictionaries(st.sampled_from(COUNTS), SOME_COUNTS, min_size=1, max_size=3))
@example(counts={"expert_shared_feed_forward_length": 768})
@example(counts={"expert_shared_feed_forward_length": 256})
@example(counts={"expert_count": 4})
@example(counts={"expert_count": 6})
def test_gguf_with_other_counts_than_its_tensors(tiny: Path, counts: dict[str, int]) -> None:
    raw = bytearray(tiny.read_bytes())
    for name, count in counts.items():
        key = f"qwen35moe.{name}".encode()
        at = raw.index(struct.pack("<Q", len(key)) + key) + 8 + len(key)
        raw[at : at + 8] = struct.pack("<II", 4, count)  # 4: an unsigned 32-bit number
    damaged = tiny.with_name("damaged.gguf")
    damaged.write_bytes(raw)
    load_or_reject(damaged)


def quantised_tensors() -> dict[str, torch.Tensor]:
    """A layer whose matrices are stored in every published way."""
    words = torch.randint(-(1 << 31), 1 << 31, (64, 64), dtype=torch.int32)
    layer = "model.layers.0"
    tensors = {
        "model.embed_tokens.weight": torch.randn(32, 64),
        "model.norm.weight": torch.ones(64),
        f"{layer}.input_layernorm.weight": torch.ones(64),
        f"{layer}.post_attention_layernorm.weight": torch.ones(64),
    }
    for name in ("q", "k", "v", "o"):
        tensors[f"{layer}.self_attn.{name}_proj.qweight"] = words[:8].clone()
        tensors[f"{layer}.self_attn.{name}_proj.qzeros"] = words[:2, :8].clone()
        tensors[f"{layer}.self_attn.{name}_proj.scales"] = torch.ones(2, 64, dtype=torch.float16)
        tensors[f"{layer}.self_attn.{name}_proj.g_idx"] = torch.arange(64, dtype=torch.int32) // 32
    for name in ("gate", "up", "down"):
        tensors[f"{layer}.mlp.{name}_proj.weight"] = torch.ones(64, 64).to(torch.float8_e4m3fn)
        tensors[f"{layer}.mlp.{name}_proj.weight_scale_inv"] = torch.ones(2, 2)
    return tensors


QUANTISATION: dict[str, Any] = {
    "quant_method": "gptq",
    "bits": 4,
    "desc_act": True,
    "weight_block_size": [32, 32],
    "checkpoint_format": "gptq",
    "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
}


def write_published(directory: Path, quantisation: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config = {
        "model_type": "llama",
        **tiny_sizes(vocab_size=32, intermediate_size=64, num_hidden_layers=1, num_key_value_heads=4),
        "tie_word_embeddings": True,
        "quantization_config": quantisation,
    }
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))


TENSORS = st.sampled_from(sorted(quantised_tensors()))
KINDS = st.sampled_from([torch.float32, torch.int32, torch.int8, torch.uint8, torch.bool])
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 8, 64]), max_size=3)


@given(
    odd=st.dictionaries(st.sampled_from(sorted(QUANTISATION)), ODD_VALUES, max_size=2),
    reshaped=st.dictionaries(TENSORS, st.tuples(SHAPES, KINDS), max_size=2),
    missing=st.one_of(st.none(), TENSORS),
)
def test_published_checkpoint_with_odd_settings_and_shapes(
    tmp_path_factory: pytest.TempPathFactory,
    odd: dict[str, Any],
    reshaped: dict[str, tuple[list[int], torch.dtype]],
    missing: str | None,
) -> None:
    directory = tmp_path_factory.mktemp("published", numbered=True)
    tensors = quantised_tensors() | {name: torch.zeros(shape, dtype=kind) for name, (shape, kind) in reshaped.items()}
    if missing is not None:
        del tensors[missing]
    write_published(directory, QUANTISATION | odd, tensors)
    load_or_reject(directory)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with every kind of layer."""
    directory = tmp_path_factory.mktemp("hybrid")
    reference_of("qwen35moe").save_pretrained(directory)
    return directory


FIELDS = (
    "attention_bias",
    "decoder_sparse_step",
    "full_attention_interval",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "layer_types",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "max_position_embeddings",
    "mlp_only_layers",
    "model_type",
    "moe_intermediate_size",
    "norm_topk_prob",
    "num_attention_heads",
    "num_experts",
    "num_experts_per_tok",
    "num_hidden_layers",
    "num_key_value_heads",
    "partial_rotary_factor",
    "rms_norm_eps",
    "rope_parameters",
    "rope_theta",
    "shared_expert_intermediate_size",
    "tie_word_embeddings",
    "vocab_size",
)
ROPE = st.dictionaries(
    st.sampled_from(["rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"]),
    st.one_of(ODD_VALUES, st.floats(), st.integers(-2, 1 << 70)),
).flatmap(
    lambda numbers: st.sampled_from(["default", "linear", "llama3", "yarn"]).map(
        lambda kind: {"rope_type": kind, "low_freq_factor": 1.0, "high_freq_factor": 1.0, **numbers}
    )
)


@given(
    changes=st.dictionaries(
        st.sampled_from(FIELDS), st.one_of(ODD_VALUES, SOME_COUNTS, st.floats(), ROPE), min_size=1, max_size=3
    )
)
@example(changes={"num_hidden_layers": 1, "layer_types": ["linear_attention"]})
@example(changes={"num_experts": 4})
@example(changes={"hidden_size": True})
@example(changes={"rope_parameters": {"rope_type": "default", "partial_rotary_factor": float("inf")}})
@example(changes={"rms_norm_eps": 1 << 2000})
def test_config_with_other_values_than_its_tensors(hybrid: Path, changes: dict[str, Any]) -> None:
    written = hybrid / "config.json"
    original = written.read_text()
    try:
        written.write_text(json.dumps(json.loads(original) | changes))
        load_or_reject(hybrid)
    finally:
        written.write_text(original)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 1, "layer_types": ["linear_attention"]}, "has 2 layers, its config 1"),
        ({"num_experts": 4}, r"gate\.weight gives the shape \(5, 256\), the model needs \(4, 256\)"),
        ({"shared_expert_intermediate_size": 768}, r"shared_expert.* the model needs \(768, 256\)"),
        ({"linear_conv_kernel_dim": 3}, r"conv1d\.weight gives .*, the model needs \(\d+, 1, 3\)"),
        ({"linear_num_value_heads": 3}, "3 value heads cannot share 2 key heads evenly"),
        ({"partial_rotary_factor": 0.3, "rope_parameters": {}}, "rotates 19 of 64 dimensions"),
    ],
)
def test_counts_that_contradict_the_tensors_are_named(hybrid: Path, changes: dict[str, Any], reason: str) -> None:
    written = hybrid / "config.json"
    original = written.read_text()
    written.write_text(json.dumps(json.loads(original) | changes))
    try:
        with pytest.raises(LoadError, match=reason):
            load_model(LoadSpec(str(hybrid), dtype="float32", context_tokens=64), CPU, lambda *_: None, lambda: False)
    finally:
        written.write_text(original)


def test_checkpoints_without_damage_load(tiny: Path, hybrid: Path, tmp_path: Path) -> None:
    write_published(tmp_path, QUANTISATION, quantised_tensors())
    for path in (tiny, hybrid, tmp_path):
        load_model(LoadSpec(str(path), dtype="float32", context_tokens=64), CPU, lambda *_: None, lambda: False)
