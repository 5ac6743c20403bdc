"""Vectors and scores of every family and pooling, against the reference library."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from cortex.neuron.models.sizes import WeightStorage, weight_bytes

from .pooled_models import EMBEDDERS, LENGTHS, QWEN3, RERANKERS, SIZES, load, request_of, run, texts_of


def weighted_mean(states: Tensor) -> Tensor:
    weights = torch.arange(1, len(states) + 1).float()[:, None]
    return (states * weights).sum(0) / weights.sum()


POOLED: dict[str, Callable[[Tensor], Tensor]] = {
    "pooling_mode_cls_token": lambda states: states[0],
    "pooling_mode_lasttoken": lambda states: states[-1],
    "pooling_mode_max_tokens": lambda states: states.amax(0),
    "pooling_mode_mean_tokens": lambda states: states.mean(0),
    "pooling_mode_mean_sqrt_len_tokens": lambda states: states.sum(0) / len(states) ** 0.5,
    "pooling_mode_weightedmean_tokens": weighted_mean,
}


def expected_vectors(directory: Path, reference: Any, texts: list[NDArray[np.uint32]]) -> NDArray[np.float32]:
    """As Sentence Transformers computes them: the modules of the files, one after another, for each text alone."""
    listed = directory / "modules.json"
    modules = [module["path"] for module in json.loads(listed.read_text())[1:]] if listed.exists() else ["1_Pooling"]
    options = json.loads((directory / "1_Pooling/config.json").read_text()) if listed.exists() else {}
    mode = next((name for name, value in options.items() if value is True), "pooling_mode_mean_tokens")
    vectors = []
    for text in texts:
        states = reference(torch.from_numpy(text.astype(np.int64))[None]).last_hidden_state[0].float()
        vector = POOLED[mode](states)
        for path in modules[1:]:
            if path.endswith("Dense"):
                tensors = load_file(directory / path / "model.safetensors")
                vector = torch.tanh(F.linear(vector, tensors["linear.weight"], tensors.get("linear.bias")))
            else:
                vector = F.normalize(vector, dim=-1)
        vectors.append(vector.detach().numpy())
    return np.stack(vectors)


def cosines(one: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths = np.linalg.norm(one, axis=-1) * np.linalg.norm(other, axis=-1)
    found: NDArray[np.float32] = (one * other).sum(-1) / lengths
    return found


@pytest.mark.parametrize("name", EMBEDDERS)
def test_vectors_match_the_reference_library_in_a_batch_and_alone(name: str, tmp_path: Path) -> None:
    reference = EMBEDDERS[name].build(tmp_path)
    engine = load(tmp_path)
    texts = texts_of(LENGTHS)
    expected = expected_vectors(tmp_path, reference, texts)
    together = run(engine, request_of("all", texts))["all"]
    assert together.shape == expected.shape
    assert cosines(expected[:-1], expected[1:]).max() < 0.99, "the texts have vectors of their own"
    assert cosines(together, expected).min() > 0.9999
    assert np.abs(together - expected).max() < 1e-3 * max(1.0, np.abs(expected).max())
    singles = [run(engine, request_of("one", [text]))["one"][0] for text in texts]
    assert cosines(np.stack(singles), together).min() > 0.99999


@pytest.mark.parametrize("name", RERANKERS)
def test_scores_match_the_reference_library(name: str, tmp_path: Path) -> None:
    pooled = RERANKERS[name]
    reference = pooled.build(tmp_path)
    engine = load(tmp_path)
    texts = texts_of(LENGTHS)
    segments = tuple(len(text) // 2 for text in texts) if "type_vocab_size" in pooled.options else ()
    has_types = pooled.options.get("type_vocab_size") == 2
    expected = []
    for text, first in zip(texts, segments or [0] * len(texts), strict=True):
        types = {"token_type_ids": (torch.arange(len(text)) >= first).long()[None]} if has_types and first else {}
        expected.append(reference(torch.from_numpy(text.astype(np.int64))[None], **types).logits.item())
    scores = run(engine, request_of("all", texts, segments))["all"]
    assert scores.shape == (len(texts), 1)
    assert np.abs(scores[:, 0] - np.array(expected)).max() < 1e-3


@pytest.mark.parametrize("tied", [True, False])
def test_qwen3_reranker_compares_the_logits_of_yes_and_no(tied: bool, tmp_path: Path) -> None:
    directory = tmp_path / "Qwen3-Reranker-tiny"
    model = type(QWEN3)(
        transformers.Qwen3ForCausalLM, QWEN3.config, QWEN3.options | {"tie_word_embeddings": tied}, modules=()
    )
    reference = model.build(directory)
    (directory / "vocab.json").write_text(json.dumps({"yes": 9, "no": 21}))
    texts = texts_of(LENGTHS)
    scores = run(load(directory), request_of("all", texts))["all"][:, 0]
    for text, score in zip(texts, scores, strict=True):
        logits = reference(torch.from_numpy(text.astype(np.int64))[None]).logits[0, -1]
        assert abs((logits[9] - logits[21]).item() - score) < 1e-3


def test_computed_size_is_what_the_layers_allocate(tmp_path: Path) -> None:
    for name, pooled in {**EMBEDDERS, **RERANKERS}.items():
        directory = tmp_path / name
        pooled.build(directory)
        engine = load(directory)
        assert engine.info.kv_bytes == 0
        assert weight_bytes(engine.pooled.architecture, WeightStorage(4)) == engine.pooled.parameters.num_bytes
        assert engine.info.context_tokens == SIZES["max_position_embeddings"] - 2 * ("xlm" in name)
