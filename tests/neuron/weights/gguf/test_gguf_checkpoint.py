from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cortex.neuron.kernels.quantised.layout import Q8
from cortex.neuron.kernels.quantised.matrix import PackedMatrix
from cortex.neuron.weights.checkpoint import TensorInfo, open_checkpoint
from cortex.neuron.weights.decode import DENSE
from cortex.neuron.weights.errors import CheckpointError, Malformed, TensorMissing, Unsupported
from cortex.neuron.weights.gguf.quants import QUANTISATIONS
from cortex.neuron.weights.gguf.types import READABLE, GGMLType
from cortex.neuron.weights.transfer import PackedPlacement, Placement, load_into

from ....examples import MANY

Writer = Callable[[], Any]

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EXPERTS = 64, 4, 2, 16, 3


def model(writer: Any, architecture: str = "llama") -> Any:
    """A model of one layer with reproducible random tensors."""
    writer.add("general.architecture", architecture)
    for key, value in {
        "block_count": 1,
        "context_length": 512,
        "embedding_length": HIDDEN,
        "feed_forward_length": 96,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 5000.0,
    }.items():
        writer.add(f"{architecture}.{key}", value)
    for kind, token in {"bos": 1, "eos": 2, "eot": 3, "padding": 2}.items():
        writer.add(f"tokenizer.ggml.{kind}_token_id", token)
    for name, tensor in weights().items():
        writer.add_float(name, tensor)
    return writer


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "token_embd.weight": (32, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
        "blk.0.ffn_norm.weight": (HIDDEN,),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write(tmp_path: Path, writer: Any, name: str = "model.gguf") -> Path:
    path = tmp_path / name
    path.write_bytes(writer.build())
    return path


def interleave(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """What converters do to q and k of Llama: rows i and i + half of a head become adjacent."""
    rows = []
    head_dim = tensor.shape[0] // num_heads
    for head in range(num_heads):
        for i in range(head_dim // 2):
            rows += [tensor[head * head_dim + i], tensor[head * head_dim + head_dim // 2 + i]]
    return torch.stack(rows)


def test_config_has_the_format_of_the_hub(tmp_path: Path, gguf_writer: Writer) -> None:
    checkpoint = open_checkpoint(write(tmp_path, model(gguf_writer())))
    assert checkpoint.config == {
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": 96,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
    }


def test_tensors_have_the_names_of_the_hub(tmp_path: Path, gguf_writer: Writer) -> None:
    checkpoint = open_checkpoint(write(tmp_path, model(gguf_writer(), "qwen3")))
    source = weights()
    assert checkpoint.config["model_type"] == "qwen3"
    layer = "model.layers.0"
    for name, original in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        f"{layer}.input_layernorm.weight": "blk.0.attn_norm.weight",
        f"{layer}.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
        f"{layer}.self_attn.q_proj.weight": "blk.0.attn_q.weight",
        f"{layer}.self_attn.k_proj.weight": "blk.0.attn_k.weight",
        f"{layer}.self_attn.v_proj.weight": "blk.0.attn_v.weight",
        f"{layer}.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    }.items():
        assert torch.equal(checkpoint.read(name), source[original]), name
    assert "lm_head.weight" not in checkpoint.tensors


def test_llama_queries_and_keys_are_read_in_the_rotary_order_of_the_hub(tmp_path: Path, gguf_writer: Writer) -> None:
    writer = model(gguf_writer())
    source = weights()
    writer.tensors = [
        entry for entry in writer.tensors if entry[0] not in ("blk.0.attn_q.weight", "blk.0.attn_k.weight")
    ]
    writer.add_float("blk.0.attn_q.weight", interleave(source["blk.0.attn_q.weight"], HEADS))
    writer.add_float("blk.0.attn_k.weight", interleave(source["blk.0.attn_k.weight"], KV_HEADS))
    bias = torch.arange(float(HEADS * HEAD_DIM))
    writer.add_float("blk.0.attn_q.bias", interleave(bias, HEADS))
    checkpoint = open_checkpoint(write(tmp_path, writer))
    assert checkpoint.config["attention_bias"] is True
    attention = "model.layers.0.self_attn"
    assert torch.equal(checkpoint.read(f"{attention}.q_proj.weight"), source["blk.0.attn_q.weight"])
    assert torch.equal(checkpoint.read(f"{attention}.k_proj.weight"), source["blk.0.attn_k.weight"])
    assert torch.equal(checkpoint.read(f"{attention}.v_proj.weight"), source["blk.0.attn_v.weight"])
    assert torch.equal(checkpoint.read(f"{attention}.q_proj.bias"), bias)


def test_quantised_tensors_of_any_size_are_read_as_float32(tmp_path: Path, gguf_writer: Writer) -> None:
    rows, random = 20_001, np.random.default_rng(1)
    blocks = np.zeros((rows, 34), dtype=np.uint8)
    blocks[:, 2:] = random.integers(0, 256, (rows, 32), dtype=np.uint8)
    scales = random.normal(0, 1, rows).astype(np.float16)
    blocks[:, :2] = scales.view(np.uint8).reshape(rows, 2)
    writer = model(gguf_writer()).add_tensor("output.weight", (rows, 32), GGMLType.Q8_0, blocks.tobytes())
    checkpoint = open_checkpoint(write(tmp_path, writer))
    assert checkpoint.tensors["lm_head.weight"] == TensorInfo((rows, 32), "Q8_0", rows * 34)
    assert checkpoint.config["tie_word_embeddings"] is False
    expected = blocks[:, 2:].view(np.int8).astype(np.float32) * scales.astype(np.float32)[:, None]
    read = checkpoint.read("lm_head.weight")
    assert read.dtype == torch.float32
    np.testing.assert_array_equal(read.numpy(), expected)


def test_rejects_an_undecodable_format_and_lists_alternatives(tmp_path: Path, gguf_writer: Writer) -> None:
    writer = model(gguf_writer()).add_tensor("output.weight", (1, 256), GGMLType.IQ2_XS, bytes(74))
    with pytest.raises(Unsupported, match=r"output.weight is in IQ2_XS.*Q4_K"):
        open_checkpoint(write(tmp_path, writer))


def test_every_readable_format_is_decoded() -> None:
    assert set(READABLE) == (DENSE.keys() | QUANTISATIONS.keys()) & GGMLType.__members__.keys() - {
        name for name in DENSE if name.startswith("I")
    }


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf])
def test_scale_that_is_not_a_number_is_rejected_by_tensor_while_reading(
    tmp_path: Path, gguf_writer: Writer, scale: float
) -> None:
    blocks = np.zeros((32, 34), dtype=np.uint8)
    blocks[20, :2] = np.array([scale], np.float16).view(np.uint8)
    writer = model(gguf_writer()).add_tensor("output.weight", (32, 32), GGMLType.Q8_0, blocks.tobytes())
    checkpoint = open_checkpoint(write(tmp_path, writer))
    matrix = PackedMatrix(Q8, 32, 32, torch.device("cpu"))
    ways: list[Callable[[], object]] = [
        lambda: load_into(
            checkpoint,
            [Placement("lm_head.weight", torch.empty(32, 32))],
            progress=lambda *_: None,
            cancelled=lambda: False,
        ),
        lambda: load_into(
            checkpoint,
            [],
            [PackedPlacement("lm_head.weight", matrix, 0, 32)],
            progress=lambda *_: None,
            cancelled=lambda: False,
        ),
    ]
    for way in ways:
        with pytest.raises(Malformed, match=r"output.weight in Q8_0 has scales that are not finite"):
            way()


def test_parts_in_the_wrong_order_are_rejected(tmp_path: Path, gguf_writer: Writer) -> None:
    first = model(gguf_writer(), "qwen3").add("split.count", 2).add("split.no", 0)
    write(tmp_path, gguf_writer().add("split.count", 2).add("split.no", 0), "m-00002-of-00002.gguf")
    with pytest.raises(Malformed, match="00002-of-00002"):
        open_checkpoint(write(tmp_path, first, "m-00001-of-00002.gguf"))


@pytest.mark.parametrize("count", [-1, 3, 99_999, "2", [2], 2.0])
def test_odd_number_of_parts_is_rejected(tmp_path: Path, gguf_writer: Writer, count: Any) -> None:
    first = model(gguf_writer(), "qwen3")
    first.add_raw("split.count", struct.pack("<Ii", 5, count)) if count == -1 else first.add("split.count", count)
    with pytest.raises(Malformed, match="split"):
        open_checkpoint(write(tmp_path, first, "m-00001-of-00002.gguf"))


@pytest.mark.parametrize(
    ("name", "message"),
    [("blk.00.attn_norm.weight", "second tensor"), ("blk.1.attn_norm.weight", "layer 1 of 1")],
)
def test_tensor_that_contradicts_the_others_is_rejected(
    tmp_path: Path, gguf_writer: Writer, name: str, message: str
) -> None:
    with pytest.raises(Malformed, match=message):
        open_checkpoint(write(tmp_path, model(gguf_writer()).add_float(name, torch.ones(HIDDEN))))


@pytest.mark.parametrize("key", ["qwen35.ssm.time_step_rank", "qwen35.ssm.group_count", "qwen35.ssm.state_size"])
def test_absurd_counts_of_heads_are_rejected_at_once(tmp_path: Path, gguf_writer: Writer, key: str) -> None:
    writer = model(gguf_writer(), "qwen35")
    sizes = {"time_step_rank": 2, "group_count": 2, "state_size": 8, "inner_size": 16, "conv_kernel": 4}
    for name, size in sizes.items():
        full = f"qwen35.ssm.{name}"
        writer.add(full, 0x7FFFFFFE if full == key else size)
    writer.tensors = [(name.replace("ffn_norm", "post_attention_norm"), *rest) for name, *rest in writer.tensors]
    writer.add_float("blk.0.attn_qkv.weight", torch.ones(48, HIDDEN))
    with pytest.raises(Malformed):
        open_checkpoint(write(tmp_path, writer))


def mixture(writer: Any) -> tuple[Any, torch.Tensor]:
    model(writer, "qwen3moe")
    for key, value in {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": 32}.items():
        writer.add(f"qwen3moe.{key}", value)
    stack = torch.randn(EXPERTS, 32, HIDDEN)
    writer.add_float("blk.0.ffn_gate_exps.weight", stack).add_float(
        "blk.0.ffn_gate_inp.weight", torch.ones(EXPERTS, HIDDEN)
    )
    return writer, stack


def test_experts_are_listed_separately_and_readable_as_a_stack(tmp_path: Path, gguf_writer: Writer) -> None:
    writer, stack = mixture(gguf_writer())
    checkpoint = open_checkpoint(write(tmp_path, writer))
    assert checkpoint.config["num_experts"] == EXPERTS
    assert checkpoint.config["num_experts_per_tok"] == 2
    assert checkpoint.config["moe_intermediate_size"] == 32
    for expert in range(EXPERTS):
        name = f"model.layers.0.mlp.experts.{expert}.gate_proj.weight"
        assert checkpoint.tensors[name] == TensorInfo((32, HIDDEN), "F32", 32 * HIDDEN * 4)
        assert torch.equal(checkpoint.read(name), stack[expert])
    assert torch.equal(checkpoint.read("model.layers.0.mlp.experts.gate_proj.weight"), stack)
    assert "model.layers.0.mlp.experts.gate_proj.weight" not in checkpoint.tensors
    assert checkpoint.read("model.layers.0.mlp.gate.weight").shape == (EXPERTS, HIDDEN)
    with pytest.raises(TensorMissing):
        checkpoint.read(f"model.layers.0.mlp.experts.{EXPERTS}.gate_proj.weight")


def test_parts_of_a_split_model_are_merged(tmp_path: Path, gguf_writer: Writer) -> None:
    whole = model(gguf_writer(), "qwen3").add("split.count", 2)
    second = gguf_writer().add("split.count", 2)
    second.tensors, whole.tensors = whole.tensors[4:], whole.tensors[:4]
    first = write(tmp_path, whole, "m-00001-of-00002.gguf")
    write(tmp_path, second, "m-00002-of-00002.gguf")
    for path in (first, tmp_path):
        checkpoint = open_checkpoint(path)
        for name in checkpoint.tensors:
            checkpoint.read(name)
        assert len(checkpoint.tensors) == len(weights())
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match="00002-of-00002"):
        open_checkpoint(first)


def test_rejects_a_later_part_and_names_the_first(tmp_path: Path, gguf_writer: Writer) -> None:
    with pytest.raises(Malformed, match="00001-of"):
        open_checkpoint(write(tmp_path, model(gguf_writer()).add("split.count", 2), "m-00002-of-00002.gguf"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda writer: writer.add_float("blk.0.ssm_a", torch.ones(2)), "ssm_a"),
        (lambda writer: writer.add("llama.expert_count", 8), "mixture"),
        (lambda writer: writer.add("llama.rope.dimension_count", 8), "rotates 8 of 16"),
        (lambda writer: writer.add("llama.attention.key_length", 12), "12"),
        (lambda writer: writer.keys.pop(1), "block_count"),
        (lambda writer: writer.tensors.pop(0), "token_embd"),
    ],
    ids=["unknown-tensor", "old-mixture", "partial-rotary", "broken-heads", "missing-key", "no-embedding"],
)
def test_rejects_models_that_are_not_supported(
    tmp_path: Path, gguf_writer: Writer, damage: Callable[[Any], Any], message: str
) -> None:
    writer = model(gguf_writer())
    damage(writer)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(write(tmp_path, writer))


@pytest.mark.parametrize(
    ("value", "error"), [([4, 2], Unsupported), ("four", Malformed), (0, Malformed), (True, Malformed)]
)
def test_rejects_metadata_of_the_wrong_type(tmp_path: Path, gguf_writer: Writer, value: Any, error: type) -> None:
    writer = model(gguf_writer())
    writer.keys = [(key, raw) for key, raw in writer.keys if key != "llama.attention.head_count"]
    with pytest.raises(error, match="head_count"):
        open_checkpoint(write(tmp_path, writer.add("llama.attention.head_count", value)))


def test_rejects_an_unknown_architecture_and_lists_the_supported_ones(tmp_path: Path, gguf_writer: Writer) -> None:
    with pytest.raises(Unsupported, match=r"'mamba'.*gemma3, .*llama, .*qwen3, .*qwen3moe"):
        open_checkpoint(write(tmp_path, model(gguf_writer(), "mamba")))


@MANY
@given(data=st.data())
def test_random_damage_raises_only_checkpoint_errors(tmp_path: Path, gguf_writer: Writer, data: st.DataObject) -> None:
    """Opens the checkpoint and reads all tensors: damage that the header check accepts must raise no other error."""
    writer, _ = mixture(gguf_writer())
    writer.add_float("rope_freqs.weight", torch.ones(HEAD_DIM // 2))
    raw = bytearray(writer.build())
    header_bytes = len(raw) - sum(len(tensor[3]) for tensor in writer.tensors)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, header_bytes))
        patch = data.draw(st.one_of(st.binary(min_size=1, max_size=4), st.just(b"\xff" * 8), st.just(b"\0" * 4)))
        raw[at : at + len(patch)] = patch
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    try:
        checkpoint = open_checkpoint(path)
        for name in checkpoint.tensors:
            checkpoint.read(name)
    except CheckpointError:
        pass
