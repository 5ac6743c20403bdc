"""What the installed `transformers` library says about a model, read from its source files.

The library is not imported: a node answers in a process without torch, and the daemon runs no code of it. Only workers
import it. Its source is data here: class attributes that are literals.
"""

from __future__ import annotations

import ast
import contextlib
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import Any, Final

from cortex.neuron.models.errors import UnsupportedModel

EXTRA: Final = ".[neuron,transformers]"
COMPARED: Final = (
    *("apertus", "arcee", "cohere", "cwm", "gemma", "gemma2", "glm", "gpt2", "gpt_bigcode", "gpt_neox", "granite_swa"),
    *("granitemoe", "helium", "minicpm3", "mixtral", "nemotron", "olmo", "olmoe", "opt", "persimmon", "phi", "phimoe"),
    *("qwen2_moe", "starcoder2"),
)
"""Types whose every logit the tests compare with the library's own."""
_PARSE_ATTEMPTS: Final = 8
_parsing: Final = threading.Lock()
"""Python 3.11 counts the depth of its parser for all threads together, and raises SystemError if two of them parse."""
_OTHER_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "num_attention_groups", "multi_query_group_num"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_sequence_length", "seq_length", "max_seq_len"),
}
"""Names in published configs that the library's own table of names lacks."""


@dataclass(frozen=True, slots=True)
class LibraryModel:
    """A causal language model of the library."""

    class_name: str
    defaults: Mapping[str, Any]
    """Options that configs may leave out."""
    options: frozenset[str]
    """The names of all options that it reads."""
    aliases: Mapping[str, str]
    """A size's common name → its name in configs of this type."""
    tp_plan: Mapping[str, str]
    """How modules are divided among devices, by patterns of their names in the base model; empty: they cannot be."""
    base_prefix: str
    """The name of the base model in the whole one."""
    tied: tuple[str, ...]
    """Parameters that share the memory of others if the embeddings are tied."""
    unread: tuple[str, ...]
    """Expressions for tensors of checkpoints that the model does not have."""
    has_transposed_linears: bool
    """Whether matrices are stored with a row for each input."""

    def option(self, config: Mapping[str, Any], name: str) -> Any:
        """The value of an option under its common name; None if neither config nor library has one."""
        names = (self.aliases.get(name, name), name, *_OTHER_NAMES.get(name, ()))
        for source in (config, self.defaults):
            for each in names:
                if source.get(each) is not None and (each in self.options or not self.options):
                    return source[each]
        return None


def library_version() -> str | None:
    """The version of the installed library; None: it is not installed."""
    if _folder() is None:
        return None
    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return None


@cache
def library_model(model_type: str) -> LibraryModel:
    """Raises UnsupportedModel if the library is not installed, or cannot run models of this type here."""
    folder, version = _folder(), library_version()
    if folder is None or version is None:
        raise UnsupportedModel(
            "the transformers library, which may have it, is not installed where the node runs: run "
            f"`pip install '{EXTRA}'` in a checkout of cortex"
        )
    installed = f"the installed transformers {version}"
    class_name = _causal_models(folder).get(model_type)
    if class_name is None:
        raise UnsupportedModel(f"{installed} has no causal language model of model_type {model_type!r}")
    modeling = _file_of(folder, model_type, class_name)
    if modeling is None:
        raise UnsupportedModel(f"{installed} lists {class_name}, but its source cannot be read")
    tree = _parse(modeling)
    attributes = _inherited(tree, class_name)
    if attributes.get("_is_stateful"):
        raise UnsupportedModel(f"{class_name} of {installed} keeps a recurrent state, which only native families can")
    if attributes.get("_supports_attention_backend") is not True:
        raise UnsupportedModel(f"{class_name} of {installed} does not support other attention implementations")
    config, config_names = _config_attributes(modeling.parent, model_type)
    tied = attributes.get("_tied_weights_keys")
    return LibraryModel(
        class_name=class_name,
        defaults={name: value for name, value in config.items() if not name.startswith("base_model_")},
        options=frozenset(config_names) | frozenset(_mapping(config.get("attribute_map"))),
        aliases=_mapping(config.get("attribute_map")),
        tp_plan=_mapping(config.get("base_model_tp_plan")),
        base_prefix=str(attributes.get("base_model_prefix") or "model"),
        tied=tuple(_mapping(tied)),
        unread=tuple(map(str, attributes.get("_keys_to_ignore_on_load_unexpected") or ())),
        has_transposed_linears="Conv1D" in modeling.read_text(encoding="utf-8"),
    )


@cache
def _folder() -> Path | None:
    try:
        spec = util.find_spec("transformers")
    except (ImportError, ValueError):
        return None
    locations = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(locations))) if locations else None


@cache
def _causal_models(folder: Path) -> Mapping[str, str]:
    """`model_type` → the class of its causal language model."""
    tree = _parse(folder / "models" / "auto" / "modeling_auto.py")
    for name, value in _assignments(tree.body):
        if name == "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES" and isinstance(value, ast.Call) and value.args:
            pairs = _literal(value.args[0]) or []
            return {pair[0]: pair[1] for pair in pairs if isinstance(pair[1], str)}
    return {}


def _file_of(folder: Path, model_type: str, class_name: str) -> Path | None:
    """The file that defines the class: usually the folder is named after the model's type."""
    own = folder / "models" / model_type.replace("-", "_")
    is_plain = re.fullmatch(r"[\w-]+", model_type) is not None
    candidates = sorted(own.glob("modeling_*.py")) if is_plain else []
    defines = re.compile(rf"^class {re.escape(class_name)}\(", re.MULTILINE)
    for path in (*candidates, *(folder / "models").glob("*/modeling_*.py")):
        if defines.search(path.read_text(encoding="utf-8")):
            return path
    return None


def _config_attributes(folder: Path, model_type: str) -> tuple[dict[str, Any], list[str]]:
    """The literal attributes of the class of a model's config (its options' defaults, and tables), and the names of all
    of its attributes. Types that share a class have that of the folder's first."""
    trees = [_parse(path) for path in sorted(folder.glob("configuration_*.py"))]
    classes = [(tree, node) for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    typed = [(tree, node, _literals(node).get("model_type")) for tree, node in classes]
    for tree, node, found in typed:
        if found == model_type or (found and model_type not in {each for _, _, each in typed}):
            return _inherited(tree, node.name), [name for name, _ in _assignments(node.body)]
    return {}, []


def _inherited(tree: ast.Module, class_name: str) -> dict[str, Any]:
    """The literal attributes of a class and of its bases in the same file."""
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    found: dict[str, Any] = {}
    waiting = [class_name]
    while waiting:
        node = classes.pop(waiting.pop(0), None)
        if node is not None:
            found = _literals(node) | found
            waiting += [base.id for base in node.bases if isinstance(base, ast.Name)]
    return found


def _literals(node: ast.ClassDef) -> dict[str, Any]:
    values = ((name, _literal(value)) for name, value in _assignments(node.body))
    return {name: value for name, value in values if value is not None}


def _assignments(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    for node in body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value


def _literal(node: ast.expr) -> Any:
    """The value of a literal; None for anything else."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _mapping(value: Any) -> dict[str, str]:
    return {str(name): str(other) for name, other in value.items()} if isinstance(value, dict) else {}


def _parse(path: Path) -> ast.Module:
    """Raises UnsupportedModel for a file that is missing or of another Python."""
    try:
        text = path.read_text(encoding="utf-8")
        for _ in range(_PARSE_ATTEMPTS - 1):
            with _parsing, contextlib.suppress(SystemError):
                return ast.parse(text)
        return ast.parse(text)
    except (OSError, SyntaxError, ValueError, SystemError) as error:
        raise UnsupportedModel(f"the installed transformers library is damaged ({error}); install it again") from error
