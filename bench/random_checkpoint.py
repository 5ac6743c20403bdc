"""Writes checkpoints with random weights: real files of a named shape, for benchmarks that include the load."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cortex.neuron.layers.parameters import Binding, Parameters
from cortex.neuron.models.decoder import Decoder
from cortex.neuron.models.registry import read_architecture
from cortex.neuron.weights.gguf.names import hub_name
from cortex.neuron.weights.gguf.types import GGMLType

SHARD_BYTES = 2 << 30
BLOCK_ELEMENTS = (1 << 24) + 43
"""Random values, generated once and repeated. Not a multiple of any row length, so that no two rows are equal."""

NUM_BLOCKS = 65_537
"""Random quantised blocks, repeated in the same way."""
ALIGNMENT = 32
BLOCK_SCALES = {
    GGMLType.Q4_K: ((0, 1 / 256), (2, 7.5 / 256)),
    GGMLType.Q6_K: ((208, 1 / 1369),),
    GGMLType.Q4_0: ((0, 1 / 4.6),),
    GGMLType.Q8_0: ((0, 1 / 74),),
}
"""Where the float16 scales of a block are, and which ones give random codes a standard deviation of about 1."""
MORE_BITS = re.compile(r"^output|^blk\.(\d+)\.(?:attn_v|ffn_down)")
"""In even layers."""
LAYER_PARTS = (
    *("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm"),
    *("ffn_norm", "ffn_gate", "ffn_up", "ffn_down"),
)


def write_checkpoint(config: Mapping[str, Any], folder: Path) -> None:
    """Writes the config, a tokenizer of `vocab_size` tokens, and bf16 shards."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(int(config["vocab_size"]), folder / "tokenizer.json")
    weights = RandomWeights()
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}

    def write_shard() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        save_file(shard, folder / name)
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, shape in shapes_on_disk(config).items():
        shard[name] = weights.of(shape)
        if sum(tensor.nbytes for tensor in shard.values()) >= SHARD_BYTES:
            write_shard()
    if shard:
        write_shard()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def write_gguf(config: Mapping[str, Any], path: Path) -> None:
    """Writes a file without a tokenizer: 4-bit matrices, with 6 bits in the output head and in half of the value and
    down projections. Rows that are too short for these formats are in Q4_0 and Q8_0. For dense Llama and Qwen3."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table, offset = b"", 0
    tensors = [(name, shape, _block_type(name, shape)) for name, shape in _gguf_shapes(config).items()]
    for name, shape, kind in tensors:
        extents = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        table += _gguf_string(name) + extents + struct.pack("<IQ", kind, offset)
        offset += -(-_num_bytes(shape, kind) // ALIGNMENT) * ALIGNMENT
    metadata = [_gguf_string(key) + value for key, value in _gguf_metadata(config)]
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)) + b"".join(metadata) + table
    blocks: dict[tuple[GGMLType, int], memoryview] = {}
    with path.open("wb") as file:
        file.write(header)
        for _, shape, kind in tensors:
            file.write(bytes(-file.tell() % ALIGNMENT))
            if kind is GGMLType.F32:
                file.write(struct.pack("<f", 1.0) * shape[0])
                continue
            if (kind, shape[1]) not in blocks:
                blocks[kind, shape[1]] = _random_blocks(kind, shape[1])
            pattern, left = blocks[kind, shape[1]], _num_bytes(shape, kind)
            while left:
                left -= file.write(pattern[:left])


def _gguf_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    parts = [f"blk.{layer}.{part}" for layer in range(config["num_hidden_layers"]) for part in LAYER_PARTS]
    names = [f"{part}.weight" for part in ("token_embd", *parts, "output_norm", "output")]
    shapes = shapes_on_disk(config)
    return {name: shapes[hub_name(name)] for name in names if hub_name(name) in shapes}


def _block_type(name: str, shape: tuple[int, ...]) -> GGMLType:
    if len(shape) == 1:
        return GGMLType.F32
    match = MORE_BITS.search(name)
    has_more_bits = match is not None and int(match[1] or 0) % 2 == 0
    if shape[1] % GGMLType.Q4_K.block_elements:
        return GGMLType.Q8_0 if has_more_bits else GGMLType.Q4_0
    return GGMLType.Q6_K if has_more_bits else GGMLType.Q4_K


def _num_bytes(shape: tuple[int, ...], kind: GGMLType) -> int:
    return torch.Size(shape).numel() // kind.block_elements * kind.block_bytes


def _random_blocks(kind: GGMLType, columns: int) -> memoryview:
    blocks = np.random.default_rng(0).integers(0, 256, (NUM_BLOCKS, kind.block_bytes), dtype=np.uint8)
    for first, scale in BLOCK_SCALES[kind]:
        blocks[:, first : first + 2] = np.array([scale * columns**-0.5], dtype=np.float16).view(np.uint8)
    return blocks.reshape(-1).data


def _gguf_metadata(config: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    architecture = config["model_type"]
    yield "general.architecture", struct.pack("<I", 8) + _gguf_string(architecture)
    counts = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]),
    }
    numbers = {"attention.layer_norm_rms_epsilon": config["rms_norm_eps"], "rope.freq_base": config["rope_theta"]}
    for key, count in counts.items():
        yield f"{architecture}.{key}", struct.pack("<II", 4, count)
    for key, number in numbers.items():
        yield f"{architecture}.{key}", struct.pack("<If", 6, number)


def _gguf_string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def shapes_on_disk(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors that the layers of the model read from a checkpoint, with their shapes."""
    parameters = Parameters(torch.device("meta"), torch.bfloat16)
    Decoder(read_architecture(config), parameters, num_positions=1)
    return {binding.source: _stored_shape(binding) for binding in parameters.bindings_from(())}


def _stored_shape(binding: Binding) -> tuple[int, ...]:
    if binding.source.endswith("conv1d.weight"):  # stored as a depthwise convolution
        width, channels = binding.destination.shape
        return channels, 1, width
    return tuple(binding.shape or binding.destination.shape)


class RandomWeights:
    """Vectors (norms) are near 1. Matrices are scaled so that a layer keeps the magnitude of its input."""

    def __init__(self) -> None:
        self._block = torch.randn(BLOCK_ELEMENTS, generator=torch.Generator().manual_seed(0))
        self._scaled: dict[int, torch.Tensor] = {}

    def of(self, shape: tuple[int, ...]) -> torch.Tensor:
        elements = torch.Size(shape).numel()
        if len(shape) == 1:
            return (1 + self._block[:elements] * 0.1).to(torch.bfloat16)
        fan_in = shape[-1]
        if fan_in not in self._scaled:
            self._scaled[fan_in] = (self._block * fan_in**-0.5).to(torch.bfloat16)
        return self._scaled[fan_in].repeat(-(-elements // BLOCK_ELEMENTS))[:elements].view(shape).contiguous()


def write_tokenizer(vocab_size: int, path: Path) -> None:
    """Single bytes, then words that have a spelling but that no text is tokenised into."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġt{index}" for index in range(len(alphabet), vocab_size)]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate([*alphabet, *words])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path), pretty=False)
