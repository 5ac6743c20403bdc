"""Tiny models of the reference library that make a vector or a score of a text, with the files that say how."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import save_file

from cortex.neuron.engine.parallel.ranks import load_engine
from cortex.neuron.engine.pooling.engine import PoolingEngine
from cortex.neuron.engine.request import EngineRequest, LoadSpec, PooledTexts

from ...models.reference_models import randomised

VOCAB = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 1,
    "eos_token_id": None,
    "bos_token_id": None,
}
DECODER = SIZES | {"num_key_value_heads": 2, "head_dim": 12}
LENGTHS = (5, 1, 40, 40, 17, 64)


@dataclass(frozen=True, slots=True)
class Pooled:
    model: Any
    config: Any
    options: dict[str, Any]
    mode: str = "mean"
    """The pooling mode, in the words of `1_Pooling/config.json`."""
    modules: tuple[str, ...] = ("Pooling", "Normalize")

    def build(self, directory: Path) -> Any:
        """Writes the model; its reference."""
        config = self.config(**self.options, attn_implementation="eager")
        reference = randomised(lambda: self.model(config), 0.3, 0.3)
        if self.config is not transformers.Gemma3TextConfig:  # whose norms add one
            for name, parameter in reference.named_parameters():
                if parameter.dim() == 1 and name.endswith("weight"):
                    parameter.data += 1.0  # otherwise every text has about the same vector
        reference.save_pretrained(directory)
        if self.modules:
            write_modules(directory, self.mode, self.modules, SIZES["hidden_size"])
        return reference


def write_modules(directory: Path, mode: str, modules: Sequence[str], hidden: int) -> None:
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for index, kind in enumerate(modules, 1):
        path = f"{index}_{kind}"
        listed.append({"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"})
        (directory / path).mkdir()
        if kind == "Pooling":
            options: dict[str, Any] = {"word_embedding_dimension": hidden, f"pooling_mode_{mode}": True}
            (directory / path / "config.json").write_text(json.dumps(options))
        if kind == "Dense":
            outputs = 24 if index == 2 else 16
            options = {"in_features": hidden, "out_features": outputs, "bias": index == 2}
            options["activation_function"] = "torch.nn.modules.activation.Tanh"
            (directory / path / "config.json").write_text(json.dumps(options))
            torch.manual_seed(index)
            tensors = {"linear.weight": torch.randn(outputs, hidden) * 0.3}
            if index == 2:
                tensors["linear.bias"] = torch.randn(outputs)
            save_file(tensors, directory / path / "model.safetensors")
            hidden = outputs
    (directory / "modules.json").write_text(json.dumps(listed))


QWEN3 = Pooled(transformers.Qwen3Model, transformers.Qwen3Config, DECODER, "lasttoken")
BERT = Pooled(transformers.BertModel, transformers.BertConfig, SIZES | {"type_vocab_size": 2}, "cls_token")
XLM = Pooled(transformers.XLMRobertaModel, transformers.XLMRobertaConfig, SIZES | {"type_vocab_size": 1}, "mean_tokens")
NOMIC = Pooled(transformers.NomicBertModel, transformers.NomicBertConfig, SIZES, "mean_tokens")
MODERN_SIZES = SIZES | {"num_hidden_layers": 4, "local_attention": 16, "cls_token_id": 0, "sep_token_id": 2}
MODERN = Pooled(transformers.ModernBertModel, transformers.ModernBertConfig, MODERN_SIZES, "cls_token")
GEMMA_SIZES = DECODER | {
    "num_hidden_layers": 4,
    "sliding_window": 16,
    "query_pre_attn_scalar": 12,
    "use_bidirectional_attention": True,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
}
GEMMA = Pooled(
    transformers.Gemma3TextModel,
    transformers.Gemma3TextConfig,
    GEMMA_SIZES,
    "mean_tokens",
    ("Pooling", "Dense", "Dense", "Normalize"),
)


def with_mode(base: Pooled, mode: str) -> Pooled:
    return Pooled(base.model, base.config, base.options, mode, base.modules)


EMBEDDERS = {
    "qwen3": QWEN3,
    "bert": BERT,
    "xlm-roberta": XLM,
    "nomic-bert": NOMIC,
    "modernbert": MODERN,
    "embedding gemma": GEMMA,
    "max": with_mode(BERT, "max_tokens"),
    "mean by square root": with_mode(BERT, "mean_sqrt_len_tokens"),
    "weighted mean": with_mode(QWEN3, "weightedmean_tokens"),
    "mean without normalisation": Pooled(BERT.model, BERT.config, BERT.options, "mean_tokens", ("Pooling",)),
    "bert alone": Pooled(BERT.model, BERT.config, BERT.options, "mean_tokens", ()),
}
LABEL = {"num_labels": 1}
RERANKERS = {
    "bert": Pooled(transformers.BertForSequenceClassification, BERT.config, BERT.options | LABEL, modules=()),
    "xlm-roberta": Pooled(
        transformers.XLMRobertaForSequenceClassification, XLM.config, XLM.options | LABEL, modules=()
    ),
    "modernbert": Pooled(
        transformers.ModernBertForSequenceClassification, MODERN.config, MODERN.options | LABEL, modules=()
    ),
    "modernbert by mean": Pooled(
        transformers.ModernBertForSequenceClassification,
        MODERN.config,
        MODERN.options | LABEL | {"classifier_pooling": "mean", "norm_bias": True, "classifier_bias": True},
        modules=(),
    ),
    "qwen3": Pooled(transformers.Qwen3ForSequenceClassification, QWEN3.config, DECODER | LABEL, modules=()),
}


def load(directory: Path, **changes: Any) -> PoolingEngine:
    spec = LoadSpec(str(directory), **({"dtype": "float32"} | changes))
    engine = load_engine(spec, "cpu", lambda *_: None, lambda: False)
    assert isinstance(engine, PoolingEngine)
    return engine


def texts_of(lengths: Sequence[int], seed: int = 0) -> list[NDArray[np.uint32]]:
    """Without the token of padding, which some models give no position."""
    generator = np.random.default_rng(seed)
    return [generator.integers(3, VOCAB, length).astype(np.uint32) for length in lengths]


def request_of(id: str, texts: Sequence[NDArray[np.uint32]], first_segments: tuple[int, ...] = ()) -> EngineRequest:
    lengths = tuple(len(text) for text in texts)
    pooled = PooledTexts(np.concatenate(texts).tobytes(), lengths, first_segments)
    return EngineRequest(id, (), 0, texts=pooled)


def run(engine: PoolingEngine, *requests: EngineRequest) -> dict[str, NDArray[np.float32]]:
    """The vectors of each request: [texts, width]"""
    for request in requests:
        engine.submit(request)
    found: dict[str, NDArray[np.float32]] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.finish == "stop", output
            width = engine.info.vector_width
            found[output.request_id] = np.frombuffer(output.vectors, dtype="<f4").reshape(-1, width)
    return found
