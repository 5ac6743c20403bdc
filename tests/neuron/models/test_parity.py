"""Llama and Qwen3 against the reference library, on tiny random checkpoints, in float32 on the CPU.

Logits of every position are compared, however a prompt is cut: whole, in chunks that do not fit pages, token by token,
and in a batch with another row.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.loading.loading import load_model
from cortex.neuron.engine.memory.plan import PAGE_TOKENS
from cortex.neuron.engine.request import EngineRequest, LoadSpec, SamplingParams
from cortex.neuron.kernels.batch import Batch, PrefillRow
from cortex.neuron.models.config import UnsupportedModel
from cortex.neuron.models.decoder import Decoder
from cortex.neuron.models.families.qwen import Qwen3

from ..tiny_models import tiny_sizes
from .reference_models import randomised

CPU = torch.device("cpu")
VOCAB = 97
PROMPT_TOKENS = 75
MAX_ERROR = 1e-3
SIZES: dict[str, Any] = {
    **tiny_sizes(vocab_size=VOCAB, hidden_size=48, intermediate_size=72),
    "eos_token_id": None,
}


def rope(kind: str, **numbers: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **numbers}}


LLAMA: dict[str, dict[str, Any]] = {
    "plain": {},
    "every head its own keys": {"num_key_value_heads": 4},
    "one key head for all": {"num_key_value_heads": 1},
    "odd heads": {"hidden_size": 45, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16},
    "seven heads, one key head": {"hidden_size": 49, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 8},
    "heads wider than hidden": {"head_dim": 32},
    "no head_dim": {"head_dim": None},
    "attention biases": {"attention_bias": True},
    "mlp biases": {"mlp_bias": True},
    "every bias": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "one layer, odd sizes": {"num_hidden_layers": 1, "hidden_size": 40, "intermediate_size": 33, "vocab_size": 101},
    "coarse norm": {"rms_norm_eps": 1e-2},
    "linear rope": rope("linear", factor=3.0),
    "llama3 rope": rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
    ),
    "yarn rope": rope("yarn", factor=4.0, original_max_position_embeddings=64),
    "another theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
}
QWEN3: dict[str, dict[str, Any]] = {
    "plain": {},
    "odd heads": {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 10},
    "seven to one": {"num_attention_heads": 7, "num_key_value_heads": 1},
    "biases": {"attention_bias": True},
    "tied": {"tie_word_embeddings": True},
    "yarn": rope("yarn", factor=4.0, original_max_position_embeddings=64),
    "windows on every layer": {
        "use_sliding_window": True,
        "sliding_window": 9,
        "layer_types": ["sliding_attention"] * 2,
    },
    "windows by turns": {
        "use_sliding_window": True,
        "sliding_window": 16,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "windows after the first layers": {
        "use_sliding_window": True,
        "sliding_window": 33,
        "num_hidden_layers": 3,
        "max_window_layers": 1,
    },
    "a window of one": {"use_sliding_window": True, "sliding_window": 1, "layer_types": ["sliding_attention"] * 2},
}
CASES = [("llama", name) for name in LLAMA] + [("qwen3", name) for name in QWEN3]


def reference_of(family: str, name: str) -> Any:
    sizes = SIZES | (LLAMA if family == "llama" else QWEN3)[name]
    classes: dict[str, tuple[Any, Any]] = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }
    config_class, model_class = classes[family]
    config = config_class(**sizes, attn_implementation="eager")
    return randomised(lambda: model_class(config), std=0.15, vector_std=0.5)


def spec(path: Path, **changes: Any) -> LoadSpec:
    options: dict[str, Any] = {"dtype": "float32", "context_tokens": 128, "max_num_seqs": 4}
    return LoadSpec(str(path), **(options | changes))


def load(path: Path) -> Decoder:
    return load_model(spec(path), CPU, lambda *_: None, lambda: False).model


class Driver:
    """Feeds token rows to a model step by step, in chunks of any sizes, over pages in no particular order."""

    def __init__(self, model: Decoder, num_rows: int) -> None:
        self._model = model
        pages_each = 128 // PAGE_TOKENS
        order = torch.randperm(num_rows * pages_each, generator=torch.Generator().manual_seed(1)) + 1
        self._pages = order.view(num_rows, pages_each).to(torch.int32)

    def logits(self, rows: Sequence[Tensor], chunks: Sequence[Sequence[int]]) -> list[Tensor]:
        """[tokens, vocab] of every row; `chunks[row]` are the sizes of its chunks, one a step."""
        parts: list[list[Tensor]] = [[] for _ in rows]
        done = [0] * len(rows)
        for step in range(max(map(len, chunks))):
            present = [(row, sizes[step]) for row, sizes in enumerate(chunks) if step < len(sizes)]
            present.sort(key=lambda item: item[1] > 1)
            hidden = self._model(self._batch(rows, done, present))
            for (row, count), part in zip(present, hidden.split([count for _, count in present]), strict=True):
                parts[row].append(self._model.logits(part.contiguous()))
                done[row] += count
        return [torch.cat(part) for part in parts]

    def _batch(self, rows: Sequence[Tensor], done: Sequence[int], present: list[tuple[int, int]]) -> Batch:
        positions = torch.cat([torch.arange(done[row], done[row] + count) for row, count in present])
        owners = torch.cat([torch.full((count,), row) for row, count in present])
        singles = sum(count == 1 for _, count in present)
        prefills, offset = [], singles
        for row, count in present[singles:]:
            prefills.append(PrefillRow(row, done[row], count, offset))
            offset += count
        return Batch(
            tokens=torch.cat([rows[row][done[row] : done[row] + count] for row, count in present]),
            positions=positions,
            slots=self._pages[owners, positions // PAGE_TOKENS].long() * PAGE_TOKENS + positions % PAGE_TOKENS,
            rows=torch.tensor([row for row, _ in present]),
            lengths=torch.tensor([done[row] + count for row, count in present], dtype=torch.int32),
            page_table=self._pages,
            num_decodes=singles,
            max_length=max(done[row] + count for row, count in present),
            prefills=tuple(prefills),
        )


def assert_parity(logits: Tensor, expected: Tensor) -> None:
    assert (logits - expected).abs().max() < MAX_ERROR
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def some_tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("family", "name"), CASES)
@torch.inference_mode()
def test_every_logit_matches_the_reference_library(family: str, name: str, tmp_path: Path) -> None:
    reference = reference_of(family, name)
    reference.save_pretrained(tmp_path)
    model = load(tmp_path)
    tokens, other = some_tokens(PROMPT_TOKENS), some_tokens(40, seed=1)
    expected, expected_other = (reference(row[None]).logits[0] for row in (tokens, other))
    (whole,) = Driver(model, 1).logits([tokens], [[PROMPT_TOKENS]])
    assert_parity(whole, expected)
    cut, second = Driver(model, 2).logits([tokens, other], [[31, 1, 2, 30, 1, 1, 1, 8], [1, 38, 1]])
    assert_parity(cut, expected)
    assert_parity(second, expected_other)


@pytest.mark.parametrize("name", ["plain", "odd heads"])
@torch.inference_mode()
def test_logits_token_by_token_equal_the_whole_prompt(name: str, tmp_path: Path) -> None:
    reference = reference_of("qwen3", name)
    reference.save_pretrained(tmp_path)
    tokens = some_tokens(PROMPT_TOKENS)
    (logits,) = Driver(load(tmp_path), 1).logits([tokens], [[1] * PROMPT_TOKENS])
    assert_parity(logits, reference(tokens[None]).logits[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_sharded_half_precision_checkpoint_computes_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    reference_of("llama", "plain").to(dtype).save_pretrained(tmp_path, max_shard_size="20KB")
    reference = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    tokens = some_tokens(PROMPT_TOKENS)
    (logits,) = Driver(load(tmp_path), 1).logits([tokens], [[40, 35]])
    assert_parity(logits, reference(tokens[None]).logits[0])


@torch.inference_mode()
def test_older_spelling_of_a_config_means_the_same(tmp_path: Path) -> None:
    """Published checkpoints have `rope_theta` and `rope_scaling`, and leave out options that the library now writes."""
    reference = reference_of("qwen3", "windows after the first layers")
    reference.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["rope_scaling"] = None
    del config["layer_types"]
    path.write_text(json.dumps(config))
    tokens = some_tokens(PROMPT_TOKENS)
    (logits,) = Driver(load(tmp_path), 1).logits([tokens], [[PROMPT_TOKENS]])
    assert_parity(logits, reference(tokens[None]).logits[0])


@torch.inference_mode()
def test_disabled_window_is_ignored(tmp_path: Path) -> None:
    """Published Qwen3 configs have a window size that `use_sliding_window: false` disables."""
    reference = reference_of("qwen3", "plain")
    reference.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config |= {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 0}
    del config["layer_types"]
    path.write_text(json.dumps(config))
    tokens = some_tokens(PROMPT_TOKENS)
    (logits,) = Driver(load(tmp_path), 1).logits([tokens], [[PROMPT_TOKENS]])
    assert_parity(logits, reference(tokens[None]).logits[0])


WINDOWED = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types must name 2 layers"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({**WINDOWED, "sliding_window": None}, "no 'sliding_window'"),
        ({**WINDOWED, "sliding_window": 0}, "0 for 'sliding_window'"),
    ],
)
def test_rejects_invalid_layer_types(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        Qwen3(SIZES | changes)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_files_of_any_precision_match_tied_or_not(family: str, tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    reference_of(family, "tied" if tied else "plain").to(dtype).save_pretrained(tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = some_tokens(PROMPT_TOKENS)
    (logits,) = Driver(load(tmp_path), 1).logits([tokens], [[50, 25]])
    assert_parity(logits, reference(tokens[None]).logits[0])


@pytest.mark.parametrize(
    ("family", "name"), [("llama", "plain"), ("llama", "llama3 rope"), ("qwen3", "windows by turns"), ("qwen3", "tied")]
)
@torch.inference_mode()
def test_engine_matches_generate_of_the_reference_library(family: str, name: str, tmp_path: Path) -> None:
    """Prompts longer than a chunk, prefilled together with rows that decode."""
    reference = reference_of(family, name)
    reference.save_pretrained(tmp_path)
    engine = Engine.load(spec(tmp_path, prefill_chunk_tokens=20), CPU, lambda *_: None, lambda: False)
    prompts = [tuple(some_tokens(length, seed=length).tolist()) for length in (1, 5, 90, 33)]
    said: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        said[str(number)] = []
        engine.submit(EngineRequest(str(number), prompt, 10, SamplingParams(temperature=0.0)))
    while engine.has_work:
        for output in engine.step():
            said[output.request_id].extend(output.tokens)
    for number, prompt in enumerate(prompts):
        ids = reference.generate(torch.tensor([prompt]), max_new_tokens=10, min_new_tokens=10, do_sample=False)
        assert said[str(number)] == ids[0, len(prompt) :].tolist()
