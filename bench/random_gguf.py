"""Writes a mixture of random weights as a GGUF file that llama.cpp and the engine both load: gpt-oss with experts in
MXFP4, or Qwen3-MoE with experts in Q4_0. The rest is BF16, norms and biases are float32. It has no tokenizer.

    python bench/random_gguf.py gpt-oss-120b /dev/shm/gpt-oss.gguf
"""

from __future__ import annotations

import argparse
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from shapes import SHAPES

ARCHITECTURES = {"gpt_oss": ("gpt-oss", Kind.MXFP4), "qwen3_moe": ("qwen3moe", Kind.Q4_0)}
_TILE_BLOCKS = 1 << 16
"""Random blocks of experts, which repeat."""


def tensors_of(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...], Kind]]:
    """Name, shape (rows first) and form of each tensor, in order."""
    _, packed = ARCHITECTURES[config["model_type"]]
    is_gpt_oss = config["model_type"] == "gpt_oss"
    hidden, head, vocab = config["hidden_size"], config["head_dim"], config["vocab_size"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    experts = config["num_local_experts" if is_gpt_oss else "num_experts"]
    inner = config["intermediate_size" if is_gpt_oss else "moe_intermediate_size"]
    yield "token_embd.weight", (vocab, hidden), Kind.BF16
    yield "output_norm.weight", (hidden,), Kind.F32
    yield "output.weight", (vocab, hidden), Kind.BF16
    for layer in range(config["num_hidden_layers"]):
        matrices: dict[str, tuple[tuple[int, ...], Kind]] = {
            "attn_q": ((queries, hidden), Kind.BF16),
            "attn_k": ((keys, hidden), Kind.BF16),
            "attn_v": ((keys, hidden), Kind.BF16),
            "attn_output": ((hidden, queries), Kind.BF16),
            "ffn_gate_inp": ((experts, hidden), Kind.F32),
            "ffn_gate_exps": ((experts, inner, hidden), packed),
            "ffn_up_exps": ((experts, inner, hidden), packed),
            "ffn_down_exps": ((experts, hidden, inner), packed),
        }
        vectors = {"attn_norm": (hidden,)}
        if is_gpt_oss:
            vectors |= {"post_attention_norm": (hidden,), "attn_sinks": (config["num_attention_heads"],)}
        else:
            vectors |= {"ffn_norm": (hidden,), "attn_q_norm": (head,), "attn_k_norm": (head,)}
        for name, (shape, kind) in matrices.items():
            yield f"blk.{layer}.{name}.weight", shape, kind
            if is_gpt_oss:
                yield f"blk.{layer}.{name}.bias", shape[:-1], Kind.F32
        for name, size in vectors.items():
            yield f"blk.{layer}.{name}.weight", size, Kind.F32


def expert_bytes(config: dict[str, Any]) -> int:
    """The routed experts of one layer."""
    total = 0
    for name, shape, kind in tensors_of(config):
        length, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        total += int(np.prod(shape)) // length * num_bytes if name.startswith("blk.0.") and len(shape) == 3 else 0
    return total


def values_of(name: str, shape: tuple[int, ...], kind: Kind) -> np.ndarray:
    """What the file has of a tensor: its beginning, which repeats."""
    random, count = np.random.default_rng(zlib.crc32(name.encode())), int(np.prod(shape))
    if kind is Kind.F32:
        scale = 0.1 if name.endswith(".bias") else shape[-1] ** -0.5
        values = random.standard_normal(count, np.float32) * np.float32(scale)
        return values + np.float32(1) if "norm" in name else values
    if kind is Kind.BF16:
        tile: np.ndarray = random.standard_normal(min(count, 1 << 22), np.float32) * shape[-1] ** -0.5
        return (tile.view(np.uint32) >> 16).astype(np.uint16)
    length, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (min(count // length, _TILE_BLOCKS), num_bytes), np.uint8)
    scale = shape[-1] ** -0.5 / 5
    if kind is Kind.MXFP4:
        blocks[:, 0] = 127 + round(np.log2(scale))
    else:
        blocks[:, :2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return blocks


def write_tensor(file: int, start: int, num_bytes: int, name: str, shape: tuple[int, ...], kind: Kind) -> None:
    tile, done = values_of(name, shape, kind).reshape(-1).view(np.uint8).data, 0
    while done < num_bytes:
        at = done % len(tile)
        done += os.pwrite(file, tile[at : at + num_bytes - done], start + done)


def write_random_gguf(path: Path, config: dict[str, Any]) -> None:
    architecture, _ = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    experts = config.get("num_local_experts") or config["num_experts"]
    keys: list[tuple[Callable[[Any], None], Any]] = [
        (writer.add_block_count, config["num_hidden_layers"]),
        (writer.add_context_length, config["max_position_embeddings"]),
        (writer.add_embedding_length, config["hidden_size"]),
        (writer.add_feed_forward_length, config["intermediate_size"]),
        (writer.add_expert_feed_forward_length, config.get("moe_intermediate_size", config["intermediate_size"])),
        (writer.add_head_count, config["num_attention_heads"]),
        (writer.add_head_count_kv, config["num_key_value_heads"]),
        (writer.add_key_length, config["head_dim"]),
        (writer.add_value_length, config["head_dim"]),
        (writer.add_layer_norm_rms_eps, config["rms_norm_eps"]),
        (writer.add_rope_freq_base, float(config.get("rope_theta", 150_000.0))),
        (writer.add_expert_count, experts),
        (writer.add_expert_used_count, config["num_experts_per_tok"]),
        (writer.add_vocab_size, config["vocab_size"]),
        (writer.add_tokenizer_model, "none"),
    ]
    for put, value in keys:
        put(value)
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
    tensors = list(tensors_of(config))
    sizes = []
    for name, shape, kind in tensors:
        length, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        sizes.append(int(np.prod(shape)) // length * num_bytes)
        stored = shape if kind is Kind.F32 else (*shape[:-1], shape[-1] // length * num_bytes)
        dtype = np.dtype(np.float32 if kind is Kind.F32 else np.uint8)
        writer.add_tensor_info(name, stored, dtype, sizes[-1], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        start, written = file.seek(0, os.SEEK_END), []
        for tensor, size in zip(tensors, sizes, strict=True):
            start += -start % writer.data_alignment
            written.append(pool.submit(write_tensor, file.fileno(), start, size, *tensor))
            start += size
        for each in written:
            each.result()


def main() -> None:
    names = [name for name, config in SHAPES.items() if config["model_type"] in ARCHITECTURES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=names)
    parser.add_argument("path", type=Path)
    arguments = parser.parse_args()
    write_random_gguf(arguments.path, SHAPES[arguments.model])
    print(f"{arguments.path.stat().st_size / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
