"""Ollama's Modelfiles, and the equivalent JSON body of `/api/create`, which define a model. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from cortex.wire.dialects.ollama.fields import OPTIONS
from cortex.wire.errors import InvalidValue, MissingModel, NotImplementedHere, shorten
from cortex.wire.fields import body as wire_body
from cortex.wire.fields.body import LARGEST_COUNT, MAX_MODEL_NAME
from cortex.wire.model_names import check_name, plain_name
from cortex.wire.preset import Preset

_INSTRUCTIONS: Final = ("FROM", "SYSTEM", "TEMPLATE", "PARAMETER", "MESSAGE", "LICENSE", "ADAPTER")
_OTHERS: Final = ("PARSER", "RENDERER", "REQUIRES", "DRAFT")
"""Instructions that select parts of Ollama itself."""
_OUR_NAMES: Final = {
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "repetition_window",
}
_HERE: Final = frozenset(
    {
        *("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty"),
        *_OUR_NAMES,
    }
)
_INTEGERS: Final = frozenset({"top_k", "seed", "num_predict", "repeat_last_n", "num_ctx"})
_MARKER: Final = re.compile(r"<[|｜]?[^<>\s]{1,40}[|｜]?>|\[/?[A-Z_]{2,20}\]")
_ACTION: Final = re.compile(r"\{\{.*?\}\}", re.DOTALL)
_DIGEST: Final = re.compile(r"sha256[:-]([0-9a-f]{64})")
_MAX_BODY_BYTES: Final = 4 << 20


class Creation(msgspec.Struct, frozen=True, kw_only=True):
    """A model to be created."""

    name: str
    source: str
    """An existing model, one on the hub, or a path on a node; empty if made of `files`."""
    files: dict[str, str] = {}
    """The SHA-256 of each uploaded file, by its path."""
    preset: Preset = Preset()
    context_tokens: int | None = None
    quant: str | None = None
    template: str = ""
    license: str | None = None
    notes: tuple[str, ...] = ()
    """Settings without effect."""


class ModelfileProblem(ValueError):
    """A Modelfile that cannot be read; the message says why."""


def as_request(text: str) -> dict[str, Any]:
    """The Modelfile as the body of `/api/create`, without a name; `projector` is a second FROM, the file of a vision
    tower. Raises ModelfileProblem."""
    found: dict[str, Any] = {}
    parameters: dict[str, Any] = {}
    for line, word, value in _instructions(text):
        if word in _OTHERS:
            raise ModelfileProblem(f"line {line}: {word} selects a part of Ollama that does not exist here; remove it")
        if word not in _INSTRUCTIONS:
            raise ModelfileProblem(
                f"line {line}: {shorten(word)} is not an instruction; use {', '.join(_INSTRUCTIONS)}"
            )
        if not value:
            raise ModelfileProblem(f"line {line}: {word} has no value")
        match word:
            case "PARAMETER":
                name, given = _divided(value)
                if name == "stop":
                    parameters.setdefault("stop", []).append(given)
                else:
                    parameters[name] = given
            case "MESSAGE":
                role, content = _divided(value)
                found.setdefault("messages", []).append({"role": role, "content": content})
            case "LICENSE":
                found.setdefault("license", []).append(value)
            case "FROM":
                if "projector" in found:
                    raise ModelfileProblem(f"line {line}: there are more than two FROM; give weights and projector")
                found["projector" if "from" in found else "from"] = value
            case "ADAPTER":
                found["adapters"] = {value: ""}
            case _:
                found[word.lower()] = value
    if "from" not in found:
        raise ModelfileProblem("there is no FROM: name a model, a repository of the hub or a file")
    return found | ({"parameters": parameters} if parameters else {})


def _instructions(text: str) -> list[tuple[int, str, str]]:
    """Line, instruction and value of each."""
    found = []
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        start, line = number, lines[number].strip()
        number += 1
        if not line or line.startswith("#"):
            continue
        word, value = (*line.split(maxsplit=1), "")[:2]
        before, quotes, rest = value.partition('"""')
        if quotes:
            parts = [rest]
            while '"""' not in parts[-1]:
                if number >= len(lines):
                    raise ModelfileProblem(f'line {start + 1}: `"""` is not closed')
                parts.append(lines[number])
                number += 1
            whole, _, after = "\n".join(parts).partition('"""')
            if after.strip():
                raise ModelfileProblem(f'line {number}: there is text after the closing `"""`')
            value = before + whole.removeprefix("\n")
        else:
            value = _unquoted(value.strip())
        found.append((start + 1, word.upper(), value))
    return found


def _divided(value: str) -> tuple[str, str]:
    """The first word, and what follows it."""
    name, rest = (*value.split(maxsplit=1), "")[:2]
    return name, _unquoted(rest.strip())


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) >= 2 and text[0] == text[-1] == '"' else text


def read_creation(body: bytes) -> Creation:
    """A body of `/api/create`. Raises InvalidValue, MissingModel, MalformedJSON or NotImplementedHere."""
    if len(body) > _MAX_BODY_BYTES:
        raise InvalidValue(f"A model's description has at most {_MAX_BODY_BYTES} bytes.")
    fields = wire_body.parse(body)
    name = plain_name(fields.text("model") or fields.text("name") or "")
    source = fields.text("from") or ""
    if not name or len(name) > MAX_MODEL_NAME:
        raise MissingModel(f"Give 'model', a name of at most {MAX_MODEL_NAME} characters.", param="model")
    check_name(name, "model")
    if fields.raw("adapters"):
        raise NotImplementedHere("ADAPTER is not supported: name a model that has the adapter merged.")
    files = _files(fields.mapping("files") or {})
    if bool(source) == bool(files):
        what = "a model, a repository of the hub or a path on the node"
        raise InvalidValue(f"Give either 'from', {what}, or 'files', which were uploaded.", param="from")
    default_params, context_tokens, notes = _parameters(fields.mapping("parameters") or {})
    license = fields.raw("license")
    try:
        messages = msgspec.convert(fields.raw("messages") or [], tuple[dict[str, str], ...])
        preset = Preset(default_params=default_params, system=fields.text("system") or None, messages=messages)
    except (ValueError, msgspec.ValidationError) as problem:
        raise InvalidValue(f"Invalid value for 'messages': {shorten(str(problem))}.", param="messages") from None
    return Creation(
        name=name,
        source=source,
        files=files,
        preset=preset,
        context_tokens=context_tokens,
        quant=fields.text("quantize") or fields.text("quantization") or None,
        template=fields.text("template") or "",
        license="\n".join(map(str, license)) if isinstance(license, list) else str(license) if license else None,
        notes=notes,
    )


def _files(given: Mapping[str, Any]) -> dict[str, str]:
    """The digests without `sha256:`. Raises InvalidValue."""
    found = {path: _DIGEST.fullmatch(digest) if isinstance(digest, str) else None for path, digest in given.items()}
    if wrong := [path for path, match in found.items() if match is None]:
        raise InvalidValue(
            f"Invalid value for 'files': {shorten(wrong[0])} has no digest such as sha256:….", param="files"
        )
    return {path: match[1] for path, match in found.items() if match is not None}


def _parameters(given: Mapping[str, Any]) -> tuple[dict[str, Any], int | None, tuple[str, ...]]:
    """The parameters under our names, the context, and what has no effect. Raises InvalidValue."""
    found: dict[str, Any] = {}
    notes = []
    context_tokens = None
    for name, value in given.items():
        if name == "stop":
            texts = value if isinstance(value, list) else [value]
            found["stop"] = [str(text) for text in texts]
        elif name == "num_ctx":
            context_tokens = int(_number(name, value))
            if context_tokens < 2:
                raise InvalidValue("Invalid value for 'num_ctx': give at least 2 tokens.", param="parameters.num_ctx")
        elif name in _HERE:
            number = _number(name, value)
            if (name, number < 0) not in (("num_predict", True), ("repeat_last_n", True)):  # as many as there are
                found[_OUR_NAMES.get(name, name)] = number
        elif name in OPTIONS:
            notes.append(f"PARAMETER {name} has no effect: placement and the engine decide")
        else:
            problem = f"'{shorten(name)}' is not supported; use {', '.join(sorted(_HERE | {'num_ctx'}))}"
            raise InvalidValue(f"Invalid parameter: {problem}.", param=f"parameters.{shorten(name)}")
    return found, context_tokens, tuple(notes)


def _number(name: str, value: Any) -> float:
    try:
        number = int(value) if name in _INTEGERS else float(value)
    except (TypeError, ValueError, OverflowError):
        number = LARGEST_COUNT + 1
    if not -LARGEST_COUNT <= number <= LARGEST_COUNT:
        problem = f"give a number, not {shorten(str(value))}"
        raise InvalidValue(f"Invalid value for '{shorten(name)}': {problem}.", param=f"parameters.{name}")
    return number


def foreign_markers(go_template: str, own_template: str) -> tuple[str, ...] | None:
    """The turn markers that a Go template writes and the model's own template does not. Empty if both match, so that
    the model's own is used. None if it writes no markers, so that they cannot be compared."""
    literal = _ACTION.sub(" ", go_template)
    actions = "".join(_ACTION.findall(go_template))
    markers = dict.fromkeys((*_MARKER.findall(literal), *_MARKER.findall(actions)))
    return tuple(marker for marker in markers if marker not in own_template) if markers else None


def as_text(name: str, source: str, preset: Preset, context_tokens: int | None, license: str | None) -> str:
    """The Modelfile of a model, as `/api/show` has it."""
    own = {ours: name for name, ours in _OUR_NAMES.items()}
    lines = [f"# Modelfile of {name}, as cortex serves it", f"FROM {source}"]
    lines += [] if context_tokens is None else [f"PARAMETER num_ctx {context_tokens}"]
    for key, value in {**preset.default_params, **preset.set_params}.items():
        values = value if isinstance(value, list) else [value]
        lines += [f"PARAMETER {own.get(key, key)} {_shown(each)}" for each in values]
    lines += [f'SYSTEM """{preset.system}"""'] if preset.system else []
    lines += [f'MESSAGE {each["role"]} """{each["content"]}"""' for each in preset.messages]
    lines += [f'LICENSE """{license}"""'] if license else []
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else f"{value:.10g}" if isinstance(value, float) else str(value)
