"""A damaged checkpoint loads correctly or fails with a LoadError: never another error, and nothing stays open."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.neuron.models.gguf_builds import reference_of
from tests.neuron.models.gguf_models import write_gguf

from cortex.neuron.engine.errors import LoadError
from cortex.neuron.engine.loading import load_model
from cortex.neuron.engine.request import LoadSpec

from ...tiny_models import tiny_sizes

CPU = torch.device("cpu")
FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    assert len(os.listdir("/proc/self/fd")) == before


def tiny_gguf(path: Path) -> None:
    reference = reference_of("qwen35moe", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    write_gguf(path, "qwen35moe", reference, ("Q8_0", "Q4_K", "F16"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    tiny_gguf(path)
    return path


@FUZZ
@given(data=st.data())
def test_gguf_with_random_bytes(tiny: Path, data: st.DataObject) -> None:
    raw = bytearray(tiny.read_bytes())
    header = raw.index(b"general.architecture"), raw.rindex(b"blk.") + 64
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.one_of(st.integers(*header), st.integers(0, len(raw) - 8)))
        patch = data.draw(st.one_of(st.binary(min_size=1, max_size=4), st.sampled_from([b"\xff" * 8, b"\0" * 8])))
        raw[at : at + len(patch)] = patch
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
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


@FUZZ
@given(data=st.data())
def test_published_checkpoint_with_odd_settings_and_shapes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("published", numbered=True)
    quantisation, tensors = dict(QUANTISATION), quantised_tensors()
    for _ in range(data.draw(st.integers(0, 2))):
        quantisation[data.draw(st.sampled_from(sorted(quantisation)))] = data.draw(ODD_VALUES)
    for _ in range(data.draw(st.integers(0, 2))):
        name = data.draw(st.sampled_from(sorted(tensors)))
        kind = data.draw(st.sampled_from([torch.float32, torch.int32, torch.int8, torch.uint8, torch.bool]))
        shape = data.draw(st.lists(st.sampled_from([0, 1, 2, 3, 8, 64]), max_size=3))
        tensors[name] = torch.zeros(shape, dtype=kind)
    if data.draw(st.booleans()):
        del tensors[data.draw(st.sampled_from(sorted(tensors)))]
    write_published(directory, quantisation, tensors)
    load_or_reject(directory)


def test_checkpoints_without_damage_load(tiny: Path, tmp_path: Path) -> None:
    write_published(tmp_path, QUANTISATION, quantised_tensors())
    for path in (tiny, tmp_path):
        load_model(LoadSpec(str(path), dtype="float32", context_tokens=64), CPU, lambda *_: None, lambda: False)
