"""The private interfaces of the `transformers` library that the engine uses.

Its source files are data here, class attributes that are literals: a node answers in a process without torch, and the
daemon runs no code of the library. Where they cannot be read so, a process of its own imports the library and says the
same: `python -m cortex.neuron.private_api.transformers MODEL_TYPE`, which takes seconds.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Any, Final, NamedTuple

from cortex.neuron.private_api.entries import PrivateEntry, Unusable

_PARSE_ATTEMPTS: Final = 8
_parsing: Final = threading.Lock()
"""Python 3.11 counts the depth of its parser for all threads together, and raises SystemError if two of them parse."""
_PROBED_TYPE: Final = "llama"
_IMPORT_TIMEOUT_S: Final = 120
_MODEL_ATTRIBUTES: Final = (
    "_is_stateful",
    "_supports_attention_backend",
    "base_model_prefix",
    "_tied_weights_keys",
    "_keys_to_ignore_on_load_unexpected",
)


class Unreadable(Exception):
    """The installed library cannot be read; the message says why."""


@dataclass(frozen=True, slots=True)
class ModelClasses:
    """The classes of a causal language model and of its config."""

    class_name: str
    model: Mapping[str, Any]
    """The model's attributes."""
    config: Mapping[str, Any]
    """The attributes of its config: its options' defaults, and tables."""
    options: tuple[str, ...]
    """The names of all options of the config."""
    has_transposed_linears: bool
    """Whether matrices are stored with a row for each input."""


@cache
def folder() -> Path | None:
    """Where the library is; None: it is not installed."""
    try:
        spec = util.find_spec("transformers")
    except (ImportError, ValueError):
        return None
    locations = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(locations))) if locations else None


@cache
def library_version() -> str | None:
    """The version of the installed library; None: it is not installed."""
    if folder() is None:
        return None
    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return None


def _is_installed() -> bool:
    return library_version() is not None


# Classes, from their source


def _probe_source() -> None:
    found = _parsed(_PROBED_TYPE)
    if found is None or found.class_name != "LlamaForCausalLM":
        raise Unusable("its source files have no table of causal language models")
    has_size = isinstance(found.config.get("hidden_size"), int)
    if found.model.get("_supports_attention_backend") is not True or not has_size:
        raise Unusable("its source files do not have the attributes of classes as literals")
    if "num_key_value_heads" not in found.options or not found.config.get("base_model_tp_plan"):
        raise Unusable("its source files do not have the options of configs as attributes of classes")


SOURCE_FILES = PrivateEntry(
    "the source files of transformers",
    "a process of its own imports the library for each type of model, which takes seconds",
    _probe_source,
    applies=_is_installed,
    is_lazy=True,
)


@cache
def model_classes(model_type: str) -> ModelClasses | None:
    """The classes of a type of model; None: the library has no causal language model of this type. Raises Unreadable,
    also where the library is not installed."""
    return _parsed(model_type) if SOURCE_FILES.is_usable else _imported(model_type)


def _parsed(model_type: str) -> ModelClasses | None:
    """Raises Unreadable."""
    if (place := folder()) is None:
        raise Unreadable("it is not installed")
    class_name = _causal_models(place).get(model_type)
    if class_name is None:
        return None
    modeling = _file_of(place, model_type, class_name)
    if modeling is None:
        raise Unreadable(f"it lists {class_name}, but its source cannot be read")
    model = _inherited(_parse(modeling), class_name)
    config, options = _config_attributes(modeling.parent, model_type)
    transposed = "Conv1D" in modeling.read_text(encoding="utf-8")
    return ModelClasses(class_name, model, config, tuple(options), transposed)


@cache
def _causal_models(place: Path) -> Mapping[str, str]:
    """`model_type` → the class of its causal language model."""
    tree = _parse(place / "models" / "auto" / "modeling_auto.py")
    for name, value in _assignments(tree.body):
        if name == "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES" and isinstance(value, ast.Call) and value.args:
            pairs = _literal(value.args[0]) or []
            return {pair[0]: pair[1] for pair in pairs if isinstance(pair[1], str)}
    return {}


def _file_of(place: Path, model_type: str, class_name: str) -> Path | None:
    """The file that defines the class: usually the folder is named after the model's type."""
    own = place / "models" / model_type.replace("-", "_")
    is_plain = re.fullmatch(r"[\w-]+", model_type) is not None
    candidates = sorted(own.glob("modeling_*.py")) if is_plain else []
    defines = re.compile(rf"^class {re.escape(class_name)}\(", re.MULTILINE)
    for path in (*candidates, *(place / "models").glob("*/modeling_*.py")):
        if defines.search(path.read_text(encoding="utf-8")):
            return path
    return None


def _config_attributes(place: Path, model_type: str) -> tuple[dict[str, Any], list[str]]:
    """The literal attributes of the class of a model's config (its options' defaults, and tables), and the names of all
    of its attributes. Types that share a class have that of the folder's first."""
    trees = [_parse(path) for path in sorted(place.glob("configuration_*.py"))]
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


def _parse(path: Path) -> ast.Module:
    """Raises Unreadable for a file that is missing or of another Python."""
    try:
        text = path.read_text(encoding="utf-8")
        for _ in range(_PARSE_ATTEMPTS - 1):
            with _parsing, contextlib.suppress(SystemError):
                return ast.parse(text)
        return ast.parse(text)
    except (OSError, SyntaxError, ValueError, SystemError) as error:
        raise Unreadable(f"it is damaged ({error}); install it again") from error


# Classes, from an import


def _imported(model_type: str) -> ModelClasses | None:
    """What `main` prints in a process of its own. Raises Unreadable."""
    command = [sys.executable, "-m", __name__, model_type]
    try:
        printed = subprocess.run(command, check=True, capture_output=True, timeout=_IMPORT_TIMEOUT_S, text=True).stdout
        fields = json.loads(printed.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        said = str(getattr(error, "stderr", None) or error).strip().splitlines()
        raise Unreadable(f"it cannot be imported ({said[-1] if said else type(error).__name__})") from error
    return None if fields is None else ModelClasses(**fields | {"options": tuple(fields["options"])})


def main(model_type: str) -> None:
    """Prints the `ModelClasses` of a type of model as one line of JSON, or null."""
    table = import_module("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    configs = import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    if not isinstance(class_name := table.get(model_type), str):
        print("null")
        return
    model = getattr(import_module("transformers"), class_name)
    config = configs[model_type]
    own = [each for each in config.__mro__ if each.__module__ == config.__module__]
    values = {name: value for each in reversed(own) for name, value in vars(each).items() if _is_plain(value)}
    options = {name for name in (*vars(config), *inspect.get_annotations(config)) if name[:2] != "__"}
    facts = ModelClasses(
        class_name,
        {name: value for name in _MODEL_ATTRIBUTES if (value := _plain(getattr(model, name, None))) is not None},
        {name: value for name, value in values.items() if name[:2] != "__" and value is not None},
        tuple(sorted(options)),
        "Conv1D" in Path(str(sys.modules[model.__module__].__file__)).read_text(encoding="utf-8"),
    )
    print(json.dumps(asdict(facts)))


def _plain(value: Any) -> Any:
    """A value that JSON can have; None for anything else."""
    value = sorted(value) if isinstance(value, set | frozenset) else value
    return value if _is_plain(value) else None


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


# Where the tensors of a checkpoint belong


def _probe_conversions() -> None:
    place = folder()
    assert place is not None
    for file, names in {
        "conversion_mapping.py": ("def get_model_conversion_mapping",),
        "core_model_loading.py": (
            "class WeightConverter",
            "class WeightRenaming",
            "def dot_natural_key",
            "def rename_source_key",
        ),
    }.items():
        try:
            text = (place / file).read_text(encoding="utf-8")
        except OSError as error:
            raise Unusable(f"this version of transformers has no {file}") from error
        if missing := [name for name in names if not re.search(rf"^{name}\b", text, re.MULTILINE)]:
            raise Unusable(f"{file} of this version of transformers has no {', '.join(missing)}")


CONVERSIONS = PrivateEntry(
    "transformers.conversion_mapping",
    "checkpoints of models of this library must have the names and shapes of its modules",
    _probe_conversions,
    applies=_is_installed,
)


class Renamed(NamedTuple):
    """Where a tensor of a checkpoint belongs."""

    target: str
    """The parameter."""
    conversion: Any = None
    """How the library fills the parameter with it and others; None: it is the whole parameter."""
    pattern: str = ""
    """That of the conversion which the tensor's name matches."""


def renamed(model: Any, names: Iterable[str], targets: Mapping[str, Any]) -> Iterator[tuple[str, Renamed]]:
    """Each tensor of a checkpoint, in the order in which the library joins them, and where it belongs. `targets`: the
    parameters of the library's `model`."""
    if CONVERSIONS.is_usable:
        try:
            yield from [*_by_table(model, names, targets)]
            return
        except (ImportError, AttributeError, TypeError) as error:
            CONVERSIONS.reject(f"{type(error).__name__}: {error}")
    prefix = f"{model.base_model_prefix}."
    for name in sorted(names, key=_natural_key):
        spellings = (name, name.removeprefix(prefix), prefix + name)
        yield name, Renamed(next((each for each in spellings if each in targets), name))


def _by_table(model: Any, names: Iterable[str], targets: Mapping[str, Any]) -> Iterator[tuple[str, Renamed]]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    table = get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, targets)
        if pattern is None:
            yield name, Renamed(target)
        else:
            yield name, Renamed(target, next(each for each in converters if pattern in each.source_patterns), pattern)


def _natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sorts numbers by their value."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split(".")]


# Modules


def _probe_experts() -> None:
    place = folder()
    assert place is not None
    path = place / "integrations" / "moe.py"
    if not path.is_file() or "\nALL_EXPERTS_FUNCTIONS = " not in path.read_text(encoding="utf-8"):
        raise Unusable("this version of transformers has no integrations.moe.ALL_EXPERTS_FUNCTIONS")


EXPERTS = PrivateEntry(
    "transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS",
    "experts of models of this library run in the pass that checks them, which some of them cannot",
    _probe_experts,
    applies=_is_installed,
)


def register_experts(name: str, function: Callable[..., Any]) -> bool:
    """Makes `function` an implementation of experts. False: it cannot be."""
    if EXPERTS.is_usable:
        import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS.register(name, function)
    return EXPERTS.is_usable


def initialise(model: Any) -> None:
    """Computes what modules compute themselves, such as the frequencies of rotations, also where the library takes them
    for filled."""
    for module in model.modules():
        module._is_hf_initialized = False
    model.initialize_weights()


def exact_modules(model: Any) -> tuple[str, ...]:
    """Parts of the names of modules that the library computes in float32."""
    return tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())


ENTRIES = (SOURCE_FILES, CONVERSIONS, EXPERTS)

if __name__ == "__main__":
    main(sys.argv[1])
