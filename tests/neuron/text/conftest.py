"""A small vocabulary in every form that models have, and models with it."""

from __future__ import annotations

import itertools
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from cortex.neuron.text.local import LocalEncoder, read_text
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.tokenizer.library import LibraryTokenizer
from cortex.neuron.text.tokenizer.tokenizer import Tokenizer as TextTokenizer
from cortex.system.cache_folder import cache_folder

TEMPLATES = Path(__file__).parent / "templates"
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
WHOLE = ("<tool_call>", "</tool_call>", "<think>", "</think>")
CORPUS = (
    'The quick brown fox jumps over the lazy dog; {"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}',
    "def hello(world):\n    return f'Hello, {world}!'\n\nHe'll say: 1234567 apples, naïve café, I'VE DONE IT.",
    "हिन्दी नमस्ते 你好世界 — emoji 😀👍🏽 done\t\r\n  spaces   here",
    "user assistant system tool parameters function think true false null 0.5 -17",
)


def pytest_configure() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def backend() -> Tokenizer:
    """Byte-level BPE with a few hundred merges, control tokens and whole tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in CONTROL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in WHOLE])
    return tokenizer


@pytest.fixture(scope="session")
def gguf_metadata(backend: Tokenizer) -> dict[str, Any]:
    """The same vocabulary as GGUF metadata."""
    described = json.loads(backend.to_str())
    vocabulary = backend.get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = {**dict.fromkeys(CONTROL, 3), **dict.fromkeys(WHOLE, 4)}
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(token, 1) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in described["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": tokens.index("<|im_start|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
    }


@pytest.fixture(scope="session")
def make_model(backend: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model directory with one of the test templates, loaded."""
    loaded: dict[str, TextModel] = {}

    def make(family: str) -> TextModel:
        if family not in loaded:
            loaded[family] = load_text(write_model(tmp_path_factory.mktemp(family), backend, family))
        return loaded[family]

    return make


def load_text(path: Path) -> TextModel:
    """A model's text, encoded in this process."""
    return TextModel.of(*read_text(path))


def local(library: LibraryTokenizer) -> TextTokenizer:
    return TextTokenizer(library.vocabulary, LocalEncoder(library))


def id_of(tokenizer: TextTokenizer, text: str | bytes) -> int | None:
    """The first token with exactly that text."""
    spelled = text if isinstance(text, bytes) else text.encode()
    return next((i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == spelled), None)


def known_id(tokenizer: TextTokenizer, text: str | bytes) -> int:
    """As `id_of`, for a text that is a token."""
    found = id_of(tokenizer, text)
    assert found is not None
    return found


def write_model(path: Path, backend: Tokenizer, family: str | None, **files: Any) -> Path:
    """A model's text files; `files` adds or replaces JSON files by their stem."""
    backend.save(str(path / "tokenizer.json"))
    ends = [backend.token_to_id("<|im_end|>"), backend.token_to_id("<|endoftext|>")]
    contents = {
        "tokenizer_config": {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "pad_token": None},
        "generation_config": {"eos_token_id": ends},
        **files,
    }
    for name, content in contents.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    if family is not None:
        (path / "chat_template.jinja").write_text((TEMPLATES / f"{family}.jinja").read_text())
    return path


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo's model in the project's cache."""
    found = min((cache_folder() / "models").glob("SmolLM2-135M-Instruct*.gguf"), default=None)
    if found is None:
        pytest.skip("the demo model is not in the cache; `cortex up --demo` fetches it")
    return found


def random_splits(text: str, seed: int, count: int) -> list[list[str]]:
    """Every character alone, and `count` random ways to split `text`."""
    generator = random.Random(seed)
    splits = [list(text)]
    for _ in range(count):
        cuts = sorted(generator.sample(range(len(text) + 1), k=generator.randint(0, min(8, len(text)))))
        bounds = [0, *cuts, len(text)]
        splits.append([text[a:b] for a, b in itertools.pairwise(bounds)])
    return splits
