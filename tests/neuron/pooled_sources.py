"""Tiny embedding and rerank models with tokenizers, as a node serves them."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from tokenizers.decoders import WordPiece

from .engine.pooling.pooled_models import BERT, RERANKERS, VOCAB

WORDS = (
    *("a", "red", "blue", "green", "cat", "dog", "bird", "fish", "house", "tree", "river", "stone"),
    *("runs", "sleeps", "swims", "flies", "query", ":", "the", "in", "of"),
)


def write_tokenizer(directory: Path) -> Tokenizer:
    """WordPiece, as BERT has it: words, letters and their continuations, [CLS] and [SEP] around texts and pairs."""
    letters = "bcdefghijklmnopqrstuvwxyz"
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS, *letters, "##a", *(f"##{letter}" for letter in letters)]
    tokens = tokens[:VOCAB]
    tokenizer = Tokenizer(models.WordPiece({token: index for index, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", tokens.index("[CLS]")), ("[SEP]", tokens.index("[SEP]"))],
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer


def write_embedder(directory: Path) -> str:
    BERT.build(directory)
    write_tokenizer(directory)
    prompts = {"prompts": {"query": "query : ", "document": ""}, "default_prompt_name": None}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return str(directory)


def write_reranker(directory: Path) -> str:
    RERANKERS["bert"].build(directory)
    write_tokenizer(directory)
    return str(directory)
