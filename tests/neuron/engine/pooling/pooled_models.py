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

from cortex.neuron.engine.loading.loading import load_model
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


EURO = Pooled(transformers.EuroBertModel, transformers.EuroBertConfig, DECODER, "lasttoken")
GTE = Pooled(transformers.GteModel, transformers.GteConfig, SIZES | {"type_vocab_size": 2}, "cls_token")


@dataclass(frozen=True, slots=True)
class Renamed(Pooled):
    """A model whose repository has a `model_type` and code of its own for it."""

    changes: tuple[tuple[str, Any], ...] = ()
    """In its config."""

    def build(self, directory: Path) -> Any:
        reference = Pooled.build(self, directory)
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | dict(self.changes)))
        return reference


class Ntk(Renamed):
    """gte-en-v1.5 stretches rotations, which the reference library does not do for it."""

    FACTOR = 2.0

    def build(self, directory: Path) -> Any:
        reference = Renamed.build(self, directory)
        config = json.loads((directory / "config.json").read_text())
        theta, dims = config.pop("rope_parameters")["rope_theta"], config["hidden_size"] // 4
        config |= {"rope_theta": theta, "rope_scaling": {"type": "ntk", "factor": self.FACTOR}}
        (directory / "config.json").write_text(json.dumps(config))
        exponents = torch.arange(0, dims, 2) / dims
        reference.rotary_emb.inv_freq = (theta * self.FACTOR) ** -exponents / self.FACTOR ** (2 / dims)
        return reference


class Adapted(Renamed):
    """With an adapter that its own code adds to the linear layers."""

    def build(self, directory: Path) -> Any:
        reference = Renamed.build(self, directory)
        folder = directory / "adapters" / "retrieval"
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8, "bias": "none"}))
        tensors: dict[str, torch.Tensor] = {}
        generator = torch.Generator().manual_seed(5)
        for name, module in reference.named_modules():
            if name.startswith("layers.") and isinstance(module, torch.nn.Linear):
                up = torch.randn(module.out_features, 4, generator=generator) * 0.2
                down = torch.randn(4, module.in_features, generator=generator) * 0.2
                module.weight.data += 2.0 * up @ down
                tensors |= {
                    f"base_model.model.{name}.lora_A.weight": down,
                    f"base_model.model.{name}.lora_B.weight": up,
                }
        save_file(tensors, folder / "adapter_model.safetensors")
        return reference


def with_mode(base: Pooled, mode: str) -> Pooled:
    return Pooled(base.model, base.config, base.options, mode, base.modules)


EMBEDDERS = {
    "qwen3": QWEN3,
    "bert": BERT,
    "xlm-roberta": XLM,
    "nomic-bert": NOMIC,
    "modernbert": MODERN,
    "embedding gemma": GEMMA,
    "eurobert": EURO,
    "gte": GTE,
    "gte with code of its own": Ntk(GTE.model, GTE.config, GTE.options, "cls_token", changes=(("model_type", "new"),)),
    "jina small": Adapted(
        QWEN3.model, QWEN3.config, DECODER, "lasttoken", changes=(("model_type", "jina_embeddings_v5"),)
    ),
    "jina nano": Adapted(
        EURO.model,
        EURO.config,
        DECODER,
        "lasttoken",
        changes=(("model_type", "jina_embeddings_v5"), ("is_decoder", False)),
    ),
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
    "gte": Pooled(transformers.GteForSequenceClassification, GTE.config, GTE.options | LABEL, modules=()),
    "qwen3": Pooled(transformers.Qwen3ForSequenceClassification, QWEN3.config, DECODER | LABEL, modules=()),
}


def load(directory: Path, **changes: Any) -> PoolingEngine:
    spec = LoadSpec(str(directory), **({"dtype": "float32"} | changes))
    engine = load_engine(spec, "cpu", lambda *_: None, lambda: False)
    assert isinstance(engine, PoolingEngine)
    return engine


def load_sliced(directory: Path, slice_s: float, **changes: Any) -> PoolingEngine:
    """With another length of its steps."""
    spec = LoadSpec(str(directory), **({"dtype": "float32"} | changes))
    loaded = load_model(spec, torch.device("cpu"), lambda *_: None, lambda: False)
    return PoolingEngine(loaded, spec, slice_s=slice_s)


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
