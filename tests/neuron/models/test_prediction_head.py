"""Heads that predict further tokens: their size, and their tensors in safetensors and GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.neuron.models.gguf_builds import reference_of
from tests.neuron.models.gguf_models import write_gguf

from cortex.neuron.engine.errors import LoadError
from cortex.neuron.engine.loading.loading import load_model
from cortex.neuron.engine.memory.sequences import KVCache
from cortex.neuron.engine.request import LoadSpec
from cortex.neuron.layers.configs import Shard
from cortex.neuron.layers.parallel import SingleRank
from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.models.decoder import Decoder
from cortex.neuron.models.packing import MatrixDevice, with_draft_output
from cortex.neuron.models.registry import read_architecture
from cortex.neuron.models.sizes import WeightStorage, kv_bytes_per_token, weight_bytes

from ..tiny_models import tiny_delta, tiny_experts, tiny_sizes

CPU = torch.device("cpu")
META = torch.device("meta")
_EXPERTS = {"n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_NEXT = {"num_nextn_predict_layers": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": tiny_delta(),
    "qwen3_next": {**tiny_delta(), **tiny_experts(), "shared_expert_intermediate_size": 32},
    "glm4_moe": {**_EXPERTS, **_NEXT, "use_qk_norm": True, "attention_bias": True},
    "glm4_moe_lite": {**_EXPERTS, **_NEXT},
    "deepseek_v3": {**_EXPERTS, **_NEXT},
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", CONFIGS)
def test_computed_size_is_what_the_head_allocates(family: str, ranks: int, device: str) -> None:
    """On a GPU the head has a copy of the output matrix."""
    plain = read_architecture({"model_type": family, **tiny_sizes(), **CONFIGS[family]})
    architecture = plain.with_head(None)
    if ranks > 1:
        plain, architecture = (each.sharded(Shard(1, ranks)) for each in (plain, architecture))
    storage = WeightStorage(2, with_draft_output(MatrixDevice(device, "bfloat16"), {}))
    group = SingleRank()
    group.shard = architecture.shard
    parameters = Parameters(META, torch.bfloat16, storage.packing, group)
    model = Decoder(architecture, parameters, num_positions=64)
    assert parameters.num_bytes == weight_bytes(architecture, storage) > weight_bytes(plain, storage)
    pages = KVCache(model.attentions, {None: 3}, 32, torch.bfloat16, META)
    assert pages.num_bytes == 3 * 32 * kv_bytes_per_token(architecture, 2) > 3 * 32 * kv_bytes_per_token(plain, 2)
    assert len(parameters.packed_bindings) == (device == "cuda")
    assert architecture.staged(range(1)).head is not None
    assert architecture.staged(range(1, 2)).head is None


def head_tensors(layer: dict[str, tuple[int, ...]], hidden: int) -> dict[str, torch.Tensor]:
    """In a GGUF file."""
    shapes = layer | {
        "nextn.eh_proj.weight": (hidden, 2 * hidden),
        **{f"nextn.{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head_norm")},
    }
    generator = torch.Generator().manual_seed(3)
    return {f"blk.2.{name}": torch.randn(shape, generator=generator) for name, shape in shapes.items()}


QWEN_NAMES = {
    "nextn.eh_proj": "mtp.fc",
    "nextn.enorm": "mtp.pre_fc_norm_embedding",
    "nextn.hnorm": "mtp.pre_fc_norm_hidden",
    "nextn.shared_head_norm": "mtp.norm",
    "attn_norm": "mtp.layers.0.input_layernorm",
    "post_attention_norm": "mtp.layers.0.post_attention_layernorm",
    **{f"attn_{part}": f"mtp.layers.0.self_attn.{part}_proj" for part in "qkv"},
    "attn_output": "mtp.layers.0.self_attn.o_proj",
    "attn_q_norm": "mtp.layers.0.self_attn.q_norm",
    "attn_k_norm": "mtp.layers.0.self_attn.k_norm",
    **{f"ffn_{part}": f"mtp.layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")},
}


def test_heads_of_both_formats_are_the_same(tmp_path: Path) -> None:
    reference = reference_of("qwen35")
    config = reference.config.get_text_config()
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    extra = head_tensors(
        {
            "attn_norm.weight": (hidden,),
            "post_attention_norm.weight": (hidden,),
            "attn_q.weight": (2 * queries, hidden),
            "attn_k.weight": (keys, hidden),
            "attn_v.weight": (keys, hidden),
            "attn_output.weight": (hidden, queries),
            "attn_q_norm.weight": (dim,),
            "attn_k_norm.weight": (dim,),
            "ffn_gate.weight": (inner, hidden),
            "ffn_up.weight": (inner, hidden),
            "ffn_down.weight": (hidden, inner),
        },
        hidden,
    )
    write_gguf(tmp_path / "m.gguf", "qwen35", reference, ("F32",), prediction_layers=1, extra=extra)
    reference.save_pretrained(tmp_path / "hub")
    weights = tmp_path / "hub" / "model.safetensors"
    tensors = load_file(weights)
    for name, tensor in extra.items():
        part = name.removeprefix("blk.2.").removesuffix(".weight")
        tensors[f"{QWEN_NAMES[part]}.weight"] = tensor - float("norm" in part)  # converters add one to norms
    save_file(tensors, weights, {"format": "pt"})
    found = []
    for path in (tmp_path / "m.gguf", tmp_path / "hub"):
        spec = LoadSpec(str(path), dtype="float32", max_num_seqs=2, speculation="mtp")
        parameters = load_model(spec, CPU, lambda *_: None, lambda: False).model.parameters
        found.append({each.source: each.destination for each in parameters.bindings if each.source.startswith("mtp.")})
    assert found[0].keys() == found[1].keys()
    assert len(found[0]) == len(extra)
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name], msg=name)


def test_a_checkpoint_without_a_head_is_rejected(tmp_path: Path) -> None:
    reference_of("qwen35").save_pretrained(tmp_path)
    with pytest.raises(LoadError, match="the checkpoint has no head"):
        load_model(LoadSpec(str(tmp_path), speculation="mtp"), CPU, lambda *_: None, lambda: False)
