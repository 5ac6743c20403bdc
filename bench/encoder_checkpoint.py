"""An embedding model with random weights: BGE-M3's shape, its files, and texts of a known number of tokens."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from random_checkpoint import RandomWeights

BGE_M3: dict[str, Any] = {
    "model_type": "xlm-roberta",
    "vocab_size": 250_002,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "max_position_embeddings": 8194,
    "type_vocab_size": 1,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
}
TINY: dict[str, Any] = {
    **BGE_M3,
    **{"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 1024},
    **{"num_hidden_layers": 4, "num_attention_heads": 4},
}
POOLING: dict[str, Any] = {"task": "embed", "modes": ["cls"], "steps": [("normalize", {})]}
"""What the files that `write_encoder` writes say, for an engine without files."""
MODULES = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPACE = "▁"


def write_encoder(shape: dict[str, Any], folder: Path) -> None:
    """Writes the config, bf16 weights, the files that describe the pooling, and a Unigram tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = RandomWeights()
    save_file({name: weights.of(size) for name, size in _tensors(shape)}, folder / "model.safetensors")
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(MODULES)
    ]
    files: dict[str, Any] = {
        "config.json": {"architectures": ["XLMRobertaModel"], **shape},
        "modules.json": modules,
        "1_Pooling/config.json": {"word_embedding_dimension": shape["hidden_size"], "pooling_mode_cls_token": True},
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    _tokenizer(shape["vocab_size"]).save(str(folder / "tokenizer.json"), pretty=False)


def texts_of(num_texts: int, num_tokens: int, vocab: int) -> list[str]:
    """Texts of words that are one token each; with the tokens around them, each has `num_tokens`."""
    words = list(itertools.islice(_words(), vocab - len(SPECIAL) - len(LETTERS) - 1))
    chosen = np.random.default_rng(0).integers(0, len(words), (num_texts, num_tokens - 2))
    return [" ".join(words[index] for index in row) for row in chosen]


def _words() -> Iterator[str]:
    return ("".join(letters) for size in (3, 4) for letters in itertools.product(LETTERS, repeat=size))


def _tokenizer(vocab: int) -> Tokenizer:
    words = (SPACE + word for word in _words())
    pieces = list(itertools.islice(itertools.chain(SPECIAL, SPACE, LETTERS, words), vocab))
    tokenizer = Tokenizer(models.Unigram([(piece, -10.0) for piece in pieces], unk_id=SPECIAL.index("<unk>")))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always")
    first, last = SPECIAL[0], SPECIAL[2]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} {last} $B {last}",
        special_tokens=[(first, 0), (last, 2)],
    )
    return tokenizer


def _tensors(shape: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    tables = {"word": "vocab_size", "position": "max_position_embeddings", "token_type": "type_vocab_size"}
    for name, size in tables.items():
        yield f"embeddings.{name}_embeddings.weight", (shape[size], hidden)
    yield from _biased("embeddings.LayerNorm", hidden)
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"encoder.layer.{layer}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            yield from _biased(f"{prefix}.attention.{name}", hidden, hidden)
        yield from _biased(f"{prefix}.attention.output.LayerNorm", hidden)
        yield from _biased(f"{prefix}.intermediate.dense", inner, hidden)
        yield from _biased(f"{prefix}.output.dense", hidden, inner)
        yield from _biased(f"{prefix}.output.LayerNorm", hidden)


def _biased(name: str, *shape: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[:1]
