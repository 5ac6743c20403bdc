"""What files say about pooling: read, or rejected by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cortex.neuron.models.config import UnsupportedModel
from cortex.neuron.models.pooling.config import DenseStep, LogitStep, NormalizeStep, PoolingConfig
from cortex.neuron.weights.errors import CheckpointError, Malformed, Unsupported
from cortex.neuron.weights.pooling_files import pooling_of, with_pooling

BERT = {"model_type": "bert", "hidden_size": 8}
QWEN3 = {"model_type": "qwen3", "hidden_size": 8}


def write(directory: Path, chain: dict[str, Any], **files: Any) -> Path:
    """`chain`: kind → the options of its folder, in order."""
    listed = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    for number, (kind, options) in enumerate(chain.items(), 1):
        folder = directory / f"{number}_{kind}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(options))
        listed.append({"type": f"sentence_transformers.models.{kind}", "path": folder.name})
    (directory / "modules.json").write_text(json.dumps(listed))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def read(directory: Path, config: dict[str, Any] = BERT) -> PoolingConfig:
    found = PoolingConfig.read(with_pooling(config, pooling_of(directory, config)))
    assert found is not None
    return found


def test_chain_of_modules_prompts_and_lengths_are_read(tmp_path: Path) -> None:
    dense = {"in_features": 16, "out_features": 4, "bias": False, "activation_function": "torch.nn.Identity"}
    write(
        tmp_path,
        {"Pooling": {"pooling_mode_lasttoken": True, "pooling_mode_cls_token": True}, "Dense": dense, "Normalize": {}},
        sentence_bert_config={"max_seq_length": 256, "do_lower_case": True},
        config_sentence_transformers={"prompts": {"query": "q: "}, "default_prompt_name": "query"},
    )
    found = read(tmp_path)
    assert (found.task, found.modes, found.max_tokens, found.lowercase) == ("embed", ("cls", "last"), 256, True)
    assert found.steps == (DenseStep("pooling.2.linear", 16, 4, False, "identity"), NormalizeStep())
    assert (found.prompts, found.default_prompt) == ({"query": "q: "}, "query")
    assert found.width(8) == 4
    with pytest.raises(UnsupportedModel, match="expects 16 elements"):
        found.check(4)


def test_newer_files_name_the_mode(tmp_path: Path) -> None:
    assert read(write(tmp_path, {"Pooling": {"pooling_mode": "mean", "embedding_dimension": 8}})).modes == ("mean",)


def test_model_that_generates_text_has_no_pooling(tmp_path: Path) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "pooling": {"task": "embed"}}
    assert pooling_of(tmp_path, config) is None
    assert "pooling" not in with_pooling(config, None), "a key of that name in the file itself means nothing"


def test_encoder_without_modules_takes_the_mean(tmp_path: Path) -> None:
    assert read(tmp_path).modes == ("mean",)


def test_reranker_is_known_by_its_head_its_module_or_its_name(tmp_path: Path) -> None:
    head = {**BERT, "architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    scored = read(tmp_path, head)
    assert (scored.task, scored.activation, scored.template) == ("score", "sigmoid", None)
    identity = {**head, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    assert read(tmp_path, identity).activation == "identity"
    with pytest.raises(Unsupported, match="2 labels"):
        pooling_of(tmp_path, {**head, "id2label": {"0": "no", "1": "yes"}})

    logits = write(tmp_path, {"LogitScore": {"true_token_id": 9, "false_token_id": 2}})
    compared = read(logits, QWEN3)
    assert compared.steps == (LogitStep(9, 2),)
    assert compared.template is not None
    assert "{query}" in compared.template

    named = tmp_path / "models--Qwen--Qwen3-Reranker-0.6B" / "snapshots" / "abc"
    named.mkdir(parents=True)
    (named / "vocab.json").write_text(json.dumps({"yes": 5, "no": 6}))
    assert read(named, QWEN3).steps == (LogitStep(5, 6),)
    (named / "vocab.json").write_text("{}")
    with pytest.raises(Malformed, match="yes and no"):
        pooling_of(named, QWEN3)


@pytest.mark.parametrize(
    ("modules", "files", "problem"),
    [
        ({"CNN": {}}, {}, "CNN"),
        ({"Normalize": {}}, {}, "no Pooling"),
        ({"Pooling": {"pooling_mode": "median"}}, {}, "median"),
        ({"Pooling": {"pooling_mode_mean_tokens": True, "include_prompt": False}}, {}, "include_prompt"),
        ({"Pooling": {}, "Dense": {"in_features": -1, "out_features": 3}}, {}, "in_features"),
        (
            {"Pooling": {}, "Dense": {"in_features": 8, "out_features": 3, "activation_function": "os.system"}},
            {},
            r"os\.system",
        ),
        ({"Pooling": {}}, {"config_sentence_transformers": {"prompts": ["x"]}}, "config_sentence_transformers"),
        ({"Pooling": {}}, {"config_sentence_transformers": {"default_prompt_name": "x"}}, "config_sentence"),
        ({"Pooling": {}}, {"modules": {"no": "list"}}, r"modules\.json"),
        ({"Pooling": {}}, {"modules": [{"type": "x"}]}, r"modules\.json"),
        ({"Pooling": {}}, {"modules": [{"type": "x.Pooling", "path": "../../etc"}]}, "outside its directory"),
        ({"Pooling": {}}, {"modules": [{"type": "x.Transformer", "path": "0_Transformer"}]}, "not at its root"),
        ({"LogitScore": {"true_token_id": "yes"}}, {}, "tokens that are compared"),
    ],
)
def test_files_that_are_damaged_or_not_supported_are_named(
    tmp_path: Path, modules: dict[str, Any], files: dict[str, Any], problem: str
) -> None:
    write(tmp_path, modules, **files)
    with pytest.raises(CheckpointError, match=problem):
        pooling_of(tmp_path, QWEN3)


def test_folder_of_a_module_must_not_be_a_link(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write(model, {"Pooling": {"pooling_mode_mean_tokens": True}})
    (model / "1_Pooling").rename(tmp_path / "elsewhere")
    (model / "1_Pooling").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Malformed, match="is a link"):
        pooling_of(model, BERT)
