"""Embedding and rerank models from GGUF files, as converters write them, against the reference library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from cortex.neuron.text.tokenizer.encoder import TextsToEncode
from cortex.neuron.text.tokenizer.library import LibraryTokenizer

from ...pooled_sources import write_tokenizer
from .pooled_models import (
    BERT,
    EURO,
    GEMMA,
    LENGTHS,
    MODERN,
    NOMIC,
    QWEN3,
    RERANKERS,
    XLM,
    Pooled,
    load,
    request_of,
    run,
    texts_of,
)

ARCHITECTURES: dict[str, tuple[str, Pooled, str]] = {
    "bert": ("bert", BERT, "cls"),
    "xlm-roberta": ("bert", XLM, "mean"),
    "nomic-bert": ("nomic-bert", NOMIC, "mean"),
    "modernbert": ("modern-bert", MODERN, "cls"),
    "embedding gemma": ("gemma-embedding", GEMMA, "mean"),
    "eurobert": ("eurobert", EURO, "last"),
    "qwen3": ("qwen3", QWEN3, "last"),
}
POOLING = {"mean": gguf.PoolingType.MEAN, "cls": gguf.PoolingType.CLS, "last": gguf.PoolingType.LAST}
EXTRA_NAMES = {
    "embeddings.LayerNorm": "token_embd_norm",
    "post_attention_layernorm": "attn_output_norm",
    "post_mlp_layernorm": "layer_output_norm",
}
"""Where the library's own class has other names than the repository that converters read."""


def write(path: Path, architecture: str, reference: Any, pooling: gguf.PoolingType, **extra: Tensor) -> None:
    config = reference.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    offset = config.pad_token_id + 1 if config.model_type == "xlm-roberta" else 0
    writer.add_context_length(config.max_position_embeddings - offset)
    writer.add_pooling_type(pooling)
    if architecture in ("eurobert", "qwen3", "gemma-embedding"):
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(1_000_000.0 if architecture == "gemma-embedding" else 10_000.0)
    else:
        writer.add_layer_norm_eps(getattr(config, "norm_eps", None) or config.layer_norm_eps)
        writer.add_causal_attention(False)
    if architecture == "nomic-bert":
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if architecture == "modern-bert":
        writer.add_sliding_window(config.local_attention)
    if architecture == "gemma-embedding":
        writer.add_sliding_window(16)
        writer.add_array("gemma-embedding.attention.sliding_window_pattern", [True, True, False, True])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper().replace("-", "_")], config.num_hidden_layers)
    joined: dict[str, list[Tensor]] = {}
    for source, tensor in reference.named_parameters():
        name, value = source.rpartition(".")[0], tensor.detach()
        if "pooler" in name or "classifier" in name or name in ("head.dense", "head.norm"):
            continue
        if architecture == "nomic-bert":
            if name.rpartition(".")[2] in ("q_proj", "k_proj", "v_proj"):
                joined.setdefault(f"blk.{name.split('.')[1]}.attn_qkv.weight", []).append(value)
                continue
            if any(part in name for part in EXTRA_NAMES):
                part = next(own for own in EXTRA_NAMES if own in name)
                layer = f"blk.{name.split('.')[1]}." if name.startswith("layers") else ""
                writer.add_tensor(f"{layer}{EXTRA_NAMES[part]}.{source.rpartition('.')[2]}", value.numpy())
                continue
        if name.endswith("position_embeddings"):
            value = value[offset:]
        if architecture == "gemma-embedding" and name.endswith("norm"):
            value = value + 1
        found = names.get_name(name) or names.get_name(f"model.{name}")
        assert found is not None, name
        writer.add_tensor(f"{found}.{source.rpartition('.')[2]}", value.contiguous().numpy())
    for name, parts in joined.items():
        writer.add_tensor(name, torch.cat(parts).numpy())
    for name, value in extra.items():
        writer.add_tensor(name, value.detach().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_vectors_of_a_gguf_file_match_the_reference_library(name: str, tmp_path: Path) -> None:
    architecture, pooled, mode = ARCHITECTURES[name]
    reference = pooled.build(tmp_path / "hub")
    torch.manual_seed(5)
    dense = {}
    if architecture == "gemma-embedding":
        dense = {"dense_2.weight": torch.randn(24, 48) * 0.3, "dense_3.weight": torch.randn(16, 24) * 0.3}
    write(tmp_path / "model.gguf", architecture, reference, POOLING[mode], **dense)
    texts = texts_of(LENGTHS)
    found = run(load(tmp_path / "model.gguf"), request_of("all", texts))["all"]
    for text, vector in zip(texts, found, strict=True):
        states = reference(torch.from_numpy(text.astype(np.int64))[None]).last_hidden_state[0]
        expected = states.mean(0) if mode == "mean" else states[0] if mode == "cls" else states[-1]
        for weight in dense.values():
            expected = F.linear(expected, weight)
        assert F.cosine_similarity(torch.from_numpy(vector.copy()), expected, dim=-1) > 0.9999
        assert abs(float(np.linalg.norm(vector)) - 1) < 1e-5


def test_scores_of_gguf_files_match_the_reference_library(tmp_path: Path) -> None:
    texts = texts_of(LENGTHS)
    reference = RERANKERS["xlm-roberta"].build(tmp_path / "xlm")
    head = reference.classifier
    extra = {"cls.weight": head.dense.weight, "cls.bias": head.dense.bias}
    extra |= {"cls.output.weight": head.out_proj.weight, "cls.output.bias": head.out_proj.bias}
    write(tmp_path / "xlm.gguf", "bert", reference.roberta, gguf.PoolingType.RANK, **extra)
    scores = run(load(tmp_path / "xlm.gguf"), request_of("all", texts))["all"][:, 0]
    for text, score in zip(texts, scores, strict=True):
        assert abs(reference(torch.from_numpy(text.astype(np.int64))[None]).logits.item() - score) < 1e-3

    decoder = Pooled(transformers.Qwen3Model, QWEN3.config, QWEN3.options, modules=()).build(tmp_path / "qwen")
    rows = decoder.get_input_embeddings().weight[[9, 21]]
    write(tmp_path / "qwen.gguf", "qwen3", decoder, gguf.PoolingType.RANK, **{"cls.output.weight": rows})
    scores = run(load(tmp_path / "qwen.gguf"), request_of("all", texts))["all"][:, 0]
    for text, score in zip(texts, scores, strict=True):
        state = decoder(torch.from_numpy(text.astype(np.int64))[None]).last_hidden_state[0, -1]
        logits = F.linear(state, rows)
        assert abs((logits[0] - logits[1]).item() - score) < 1e-3


def test_wordpiece_vocabulary_of_a_gguf_file_has_the_tokens_of_the_original(tmp_path: Path) -> None:
    original = write_tokenizer(tmp_path)
    tokens = [original.id_to_token(id) or "" for id in range(original.get_vocab_size())]
    written = [each if each.startswith("[") else each[2:] if each.startswith("##") else f"▁{each}" for each in tokens]
    metadata = {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": written,
        "tokenizer.ggml.cls_token_id": tokens.index("[CLS]"),
        "tokenizer.ggml.seperator_token_id": tokens.index("[SEP]"),
        "tokenizer.ggml.unknown_token_id": tokens.index("[UNK]"),
    }
    library = LibraryTokenizer.from_gguf(metadata)
    for text in ("a Red cat sleeps", "birdhouse, trée", ""):
        assert library.encode_document(text) == original.encode(text).ids
    pair = library.encode_texts(TextsToEncode(("the bird",), ("red fish",)))
    expected = original.encode("red fish", "the bird")
    assert list(pair.ids) == [expected.ids]
    assert list(pair.first_segments) == [expected.type_ids.index(1)]
