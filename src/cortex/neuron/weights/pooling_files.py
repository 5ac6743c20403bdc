"""What a model's files say about pooling, as plain values for its config. Needs no torch.

Sentence Transformers describes a model as a chain of modules, each in a folder of its own (`modules.json`). A reranker
is a model with a head for one label, or a decoder whose logits of two tokens are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeGuard

from cortex.neuron.families.registry import family_of
from cortex.neuron.weights.directory import MAX_JSON_BYTES, model_file, parse_json, read_json
from cortex.neuron.weights.errors import Malformed, Unsupported

POOLING_KEY: Final = "pooling"
"""Where a checkpoint's config has it. A model that generates text has none."""
_MODULE: Final = "pooling"
"""The prefix of the tensors of modules, before their number."""
_MODES: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
_MODE_NAMES: Final = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
_ACTIVATIONS: Final = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "identity": "identity",
    "relu": "relu",
    "sigmoid": "sigmoid",
    "silu": "silu",
    "tanh": "tanh",
}
_MAX_SIZE: Final = 1 << 20
_MAX_MODULES: Final = 32
_MAX_PROMPTS: Final = 256
_MAX_PROMPT_CHARACTERS: Final = 1 << 14
RERANK_TEMPLATE: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""The prompt of decoders that were trained to rerank."""


def pooling_of(directory: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """None for a model that generates text. Raises CheckpointError for modules that are damaged or not supported."""
    head = _score_head(config)
    modules = _modules(directory)
    if head is not None:
        return {**head, **_limits(directory)}
    if modules is None:
        family = family_of(config)
        if family.pooling:
            pooled = {"task": "embed", "modes": [family.pooling], "steps": [], **_limits(directory)}
            if not family.has_adapters:
                return pooled
            return {**pooled, "steps": [("normalize", {})], **_prompts(directory)}
        return _named_reranker(directory, config)
    found: dict[str, Any] = {"task": "embed", "modes": [], "steps": [], **_limits(directory), **_prompts(directory)}
    for index, (kind, path) in enumerate(modules):
        _add_module(found, directory, config, index, kind, path)
    if not found["modes"]:
        raise Unsupported(f"{directory / 'modules.json'} has no Pooling module; such models are not supported")
    return found


def with_pooling(config: Mapping[str, Any], pooling: Mapping[str, Any] | None) -> dict[str, Any]:
    """`config` with what `pooling_of` found, and with nothing else under that name."""
    rest = {name: value for name, value in config.items() if name != POOLING_KEY}
    return rest if pooling is None else {**rest, POOLING_KEY: pooling}


def weighted_modules(directory: Path) -> dict[str, str]:
    """The folders of modules that have weights → the prefix of their tensors in the checkpoint."""
    modules = _modules(directory) or []
    return {path: f"{_MODULE}.{index}" for index, (kind, path) in enumerate(modules) if kind in _WEIGHTED}


_WEIGHTED: Final = frozenset({"Dense", "LayerNorm"})


def _modules(directory: Path) -> list[tuple[str, str]] | None:
    """The kind and the folder of each module, in order; None without `modules.json`."""
    if not (directory / "modules.json").exists():
        return None
    path = model_file(directory, "modules.json")
    with path.open("rb") as file:
        listed = parse_json(file.read(MAX_JSON_BYTES), path)
    if not isinstance(listed, list) or not 0 < len(listed) <= _MAX_MODULES:
        raise Malformed(f"{path} is not a list of modules; download it again")
    modules = []
    for module in listed:
        kind, folder = (module.get("type"), module.get("path")) if isinstance(module, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(folder, str):
            raise Malformed(f"{path} has a module without type or path; download it again")
        modules.append((kind.rpartition(".")[2], folder))
    return modules


def _add_module(
    found: dict[str, Any], directory: Path, config: Mapping[str, Any], index: int, kind: str, path: str
) -> None:
    steps: list[Any] = found["steps"]
    match kind:
        case "Transformer":
            if path not in ("", "."):
                raise Unsupported(f"{directory} has its weights in {path!r}, not at its root; use a newer repository")
        case "Pooling":
            found["modes"] = _pooling_modes(_options(directory, path), directory)
        case "Normalize":
            steps.append(("normalize", {}))
        case "Dense":
            steps.append(("dense", _dense(_options(directory, path), directory, f"{_MODULE}.{index}.linear")))
        case "LayerNorm":
            size = _size(_options(directory, path), "dimension", directory)
            source = f"{_MODULE}.{index}.norm"
            steps.append(("norm", {"source": source, "size": size, "eps": 1e-5, "bias": True}))
        case "LogitScore":
            options = _options(directory, path)
            tokens = {name: options.get(f"{name}_id") for name in ("true_token", "false_token")}
            is_one, is_other = map(_is_size, tokens.values())
            if not is_one or not (is_other or tokens["false_token"] is None):
                raise Malformed(f"{directory / path} does not name the tokens that are compared; download it again")
            found.update(task="score", modes=["last"], activation="sigmoid", template=_template(config, directory))
            steps.append(("logit", tokens))
        case _:
            raise Unsupported(f"{directory / 'modules.json'} has a module {kind[:80]!r}, which is not supported")


def _named_reranker(directory: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Rerankers may have the files of a chat model: only their name says what they are. A snapshot of the hub cache
    has the name of its repository in its path."""
    parts = directory.absolute().parts[-3:]
    if not family_of(config).may_rerank or not any("rerank" in part.lower() for part in parts):
        return None
    true_token, false_token = _vocabulary_ids(directory, ("yes", "no"))
    steps = [("logit", {"true_token": true_token, "false_token": false_token})]
    head = {"task": "score", "modes": ["last"], "steps": steps, "activation": "sigmoid", "template": RERANK_TEMPLATE}
    return {**head, **_limits(directory)}


def _vocabulary_ids(directory: Path, tokens: tuple[str, ...]) -> list[int]:
    if (directory / "vocab.json").exists():
        vocabulary: Any = read_json(directory, "vocab.json")
    else:
        model = read_json(directory, "tokenizer.json").get("model")
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
    found = [vocabulary.get(token) if isinstance(vocabulary, dict) else None for token in tokens]
    ids = [id for id in found if _is_size(id)]
    if len(ids) < len(tokens):
        raise Malformed(f"{directory} has no tokens {' and '.join(tokens)}, whose logits a reranker compares")
    return ids


def _template(config: Mapping[str, Any], directory: Path) -> str:
    if not family_of(config).may_rerank:
        raise Unsupported(f"{directory} compares logits after a prompt of its own, which is not known for its family")
    return RERANK_TEMPLATE


def _pooling_modes(options: Mapping[str, Any], directory: Path) -> list[str]:
    if options.get("include_prompt") is False:
        raise Unsupported(f"{directory} leaves prompts out of the pooling (include_prompt), which is not supported")
    named = options.get("pooling_mode")
    if named is not None:
        names = named if isinstance(named, list) else [named]
        if not all(name in _MODE_NAMES for name in names):
            raise Unsupported(f"{directory} pools by {str(named)[:80]!r}; supported are {', '.join(_MODE_NAMES)}")
        chosen = {_MODE_NAMES[name] for name in names}
        return [mode for mode in _MODES.values() if mode in chosen]
    return [mode for key, mode in _MODES.items() if options.get(key) is True]


def _dense(options: Mapping[str, Any], directory: Path, source: str) -> dict[str, Any]:
    return {
        "source": source,
        "inputs": _size(options, "in_features", directory),
        "outputs": _size(options, "out_features", directory),
        "bias": options.get("bias", True) is True,
        "activation": _activation(options.get("activation_function", "Tanh"), directory),
    }


def _activation(name: Any, directory: Path) -> str:
    """`torch.nn.modules.activation.Tanh` and the names of configs alike."""
    short = str(name).rpartition(".")[2].removesuffix("()").lower()
    if short not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise Unsupported(f"{directory} applies {str(name)[:80]!r} after the pooling; supported are {known}")
    return _ACTIVATIONS[short]


def _limits(directory: Path) -> dict[str, Any]:
    options = _optional(directory, "sentence_bert_config.json")
    max_tokens = options.get("max_seq_length")
    return {
        "max_tokens": max_tokens if _is_size(max_tokens) and max_tokens > 0 else None,
        "lowercase": options.get("do_lower_case") is True,
    }


def _prompts(directory: Path) -> dict[str, Any]:
    options = _optional(directory, "config_sentence_transformers.json")
    prompts, default = options.get("prompts") or {}, options.get("default_prompt_name")
    dimensions = options.get("matryoshka_dimensions") or []
    if (
        not isinstance(prompts, dict)
        or len(prompts) > _MAX_PROMPTS
        or not all(isinstance(text, str) and len(text) <= _MAX_PROMPT_CHARACTERS for text in prompts.values())
        or not (default is None or default in prompts)
        or not (isinstance(dimensions, list) and all(map(_is_size, dimensions)))
    ):
        raise Malformed(f"{directory / 'config_sentence_transformers.json'} is damaged; download it again")
    return {"prompts": prompts, "default_prompt": default, "dimensions": dimensions}


def _score_head(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The pooling of a model with a classification head; None for one without."""
    classes = config.get("architectures") or []
    name = next((each for each in classes if str(each).endswith("ForSequenceClassification")), None)
    if name is None:
        return None
    hidden, labels = config.get("hidden_size"), config.get("id2label")
    num_labels = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)
    if num_labels != 1 or not _is_size(hidden):
        raise Unsupported(f"{name} has {num_labels} labels; rerank models have one")

    def dense(source: str, outputs: int, *, bias: bool = True, activation: str = "identity") -> tuple[str, Any]:
        return "dense", {
            "source": source,
            "inputs": hidden,
            "outputs": outputs,
            "bias": bias,
            "activation": activation,
        }

    mode, steps = "cls", []
    family = family_of(config)
    match family.score_head:
        case "pooler":
            steps = [dense("pooler.dense", hidden, activation="tanh"), dense("classifier", 1)]
        case "classifier":
            steps = [dense("classifier.dense", hidden, activation="tanh"), dense("classifier.out_proj", 1)]
        case "normed":
            bias = config.get("classifier_bias") is True
            activation = _activation(config.get("classifier_activation", "gelu"), Path(str(name)))
            eps, has_bias = config.get("norm_eps", 1e-5), config.get("norm_bias") is True
            mode = "mean" if config.get("classifier_pooling") == "mean" else "cls"
            steps = [
                dense("head.dense", hidden, bias=bias, activation=activation),
                ("norm", {"source": "head.norm", "size": hidden, "eps": eps, "bias": has_bias}),
                dense("classifier", 1),
            ]
        case _:
            mode, steps = "last", [dense("score", 1, bias=False)]
    return {
        "task": "score",
        "modes": [mode],
        "steps": steps,
        "activation": _score_activation(config),
        **({"template": RERANK_TEMPLATE} if not family.is_encoder else {}),
    }


def _score_activation(config: Mapping[str, Any]) -> str:
    """Sigmoid, unless the config names another."""
    own = config.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, dict) else config.get("sbert_ce_default_activation_function")
    return "sigmoid" if named is None else _activation(named, Path("config.json"))


def _options(directory: Path, folder: str) -> Mapping[str, Any]:
    return read_json(module_folder(directory, folder), "config.json")


def module_folder(directory: Path, folder: str) -> Path:
    """The folder of a module, which must be in `directory` itself. Raises Malformed."""
    if folder != Path(folder).name or "\\" in folder or "\0" in folder or folder in ("", ".", ".."):
        raise Malformed(f"{directory} has a module in {folder[:80]!r}, outside its directory; do not trust this model")
    if (directory / folder).is_symlink():
        raise Malformed(f"{directory / folder} is a link; copy the folder instead")
    return directory / folder


def _optional(directory: Path, name: str) -> Mapping[str, Any]:
    return read_json(directory, name) if (directory / name).exists() else {}


def _size(options: Mapping[str, Any], name: str, directory: Path) -> int:
    value = options.get(name)
    if not _is_size(value) or not value:
        raise Malformed(f"{directory} has {str(value)[:80]!r} for {name} of a module; download it again")
    return value


def _is_size(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < _MAX_SIZE
