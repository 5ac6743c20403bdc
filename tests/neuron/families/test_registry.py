"""A family's names are in its descriptor and nowhere else, and apply to its own files only."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest

from cortex.neuron.families import registry
from cortex.neuron.families.registry import BY_TYPE, FAMILIES, GGUF, SPLITS, SYNTAXES
from cortex.neuron.models.registry import ENCODERS
from cortex.neuron.models.registry import FAMILIES as DECODERS
from cortex.neuron.weights.family_tensors import arranged
from cortex.neuron.weights.stored import StoredTensor

SOURCE = Path(__file__).parents[3] / "src" / "cortex"
OWNERS = ("neuron/families/", "neuron/models/registry.py")
ARCHITECTURES = tuple(
    f"neuron/models/{folder}/" for folder in ("families", "mixtures", "hybrids", "encoders", "towers")
)
"""What computes a family's layers, in a class for each."""
ORDINARY = {"bert", "gpt", "gte", "llama", "modern", "muse", "new", "phi", "seed", "xlm"}
"""Beginnings of names that are also words or other programs."""
OTHER_THINGS = {
    "cli/commands/doctor/checks.py": "the model that is downloaded to try the program",
    "cli/up/command.py": "the same model",
    "cli/up/demo.py": "the same model",
    "fleet/known_models.py": "repositories of the hub",
    "neuron/models/transformers/library.py": "model types that are not families here",
    "neuron/models_page.py": "prose of the documentation",
    "neuron/text/template/template_source.py": "versions of the tokenizer file `tekken.json`",
    "neuron/text/tokenizer/gguf_vocabulary.py": "values of `tokenizer.ggml.model`",
    "neuron/weights/gguf/towers.py": "values of `clip.projector_type`",
    "wire/dialects/openai_chat/request.py": "a value of `reasoning_format`",
    "wire/dialects/page.py": "makers of APIs",
}
"""Modules that have such a name for something else."""


def stems() -> set[str]:
    """How names of families begin: `qwen` for `qwen3_moe`."""
    found = {cast("re.Match[str]", re.match(r"[a-z]+", name))[0] for name in (*BY_TYPE, *GGUF)}
    return found - ORDINARY


def mentions(code: str, names: set[str]) -> Iterator[str]:
    """Identifiers and strings with one of the names. Comments and docstrings may explain things by example."""
    lowered = code.lower()
    found = {name for name in names if name in lowered}
    if not found:
        return
    pattern = re.compile("|".join(found), re.IGNORECASE)
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        is_statement = before in (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT)
        is_docstring = token.type == tokenize.STRING and is_statement and token.string.startswith('"""')
        if token.type in (tokenize.NAME, tokenize.STRING) and not is_docstring and pattern.search(token.string):
            yield f"line {token.start[0]}: {token.string[:60]}"
        before = token.type


def test_only_the_descriptor_and_the_architecture_of_a_family_mention_it() -> None:
    names, found = stems(), {}
    for path in sorted(SOURCE.rglob("*.py")):
        module = path.relative_to(SOURCE).as_posix()
        if not module.startswith(OWNERS + ARCHITECTURES) and (lines := list(mentions(path.read_text(), names))):
            found[module] = lines
    assert {module: lines for module, lines in found.items() if module not in OTHER_THINGS} == {}
    assert found.keys() == OTHER_THINGS.keys(), "remove modules that no longer mention one"


def test_detects_a_name_in_code_but_not_in_prose() -> None:
    code = '"""As Qwen has it."""\n\n# of Qwen\nif model_type == "qwen3":\n    read_qwen()\n'
    assert [line.partition(":")[0] for line in mentions(code, {"qwen"})] == ["line 4", "line 5"]


def tensors_named(*names: str) -> dict[str, StoredTensor]:
    return {name: StoredTensor(cast("Any", None), 0, (4, 4), "F32", 64, name=name) for name in names}


@pytest.mark.parametrize("model_type", sorted(name for name, family in BY_TYPE.items() if not family.is_encoder))
def test_names_of_one_family_do_not_change_tensors_of_another(model_type: str) -> None:
    own = BY_TYPE[model_type].tensor_names
    others = {part for family in FAMILIES if not family.is_encoder for part in family.tensor_names} - own.keys()
    names = [f"model.layers.0{part}x.y" if part[0] == "." else f"{part}x.y" for part in sorted(others)]
    foreign = [name for name in names if not any(part in name for part in own)]
    assert foreign
    config = {"model_type": model_type}
    assert arranged(config, tensors_named(*foreign)).keys() == set(foreign)


def test_family_reads_its_own_tensor_names() -> None:
    moe = "model.layers.0.block_sparse_moe"
    stored = tensors_named(f"{moe}.experts.0.w1.weight", f"{moe}.gate.weight")
    renamed = {"model.layers.0.mlp.experts.0.gate_proj.weight", "model.layers.0.mlp.gate.weight"}
    assert arranged({"model_type": "minimax_m2"}, stored).keys() == renamed
    assert arranged({"model_type": "mixtral"}, stored).keys() == stored.keys()


def test_no_name_belongs_to_two_families() -> None:
    assert len(BY_TYPE) == sum(len(family.model_types) for family in FAMILIES)
    assert len(GGUF) == sum(len(family.gguf) for family in FAMILIES)
    syntaxes = {syntax for family in FAMILIES for syntax in family.tool_syntaxes}
    assert syntaxes <= set(SYNTAXES.values())
    names = [name for family in FAMILIES for name in family.pretokenizers]
    assert len(names) == len(set(names))
    assert set(names) <= SPLITS.keys()


def test_descriptor_and_architecture_of_a_family_are_in_files_of_one_name() -> None:
    described = {
        name: module.__name__.rpartition(".")[2]
        for module in vars(registry).values()
        if isinstance(module, ModuleType) and hasattr(module, "FAMILIES")
        for family in module.FAMILIES
        for name in family.model_types
    }
    assert described == {
        name: architecture.__module__.rpartition(".")[2] for name, architecture in {**DECODERS, **ENCODERS}.items()
    }


def test_families_refer_only_to_architectures_and_language_models_that_exist() -> None:
    assert {name for family in FAMILIES for name in family.also_gguf} <= GGUF.keys()
    assert {name for family in FAMILIES for names in family.projectors.values() for name in names} <= BY_TYPE.keys()
