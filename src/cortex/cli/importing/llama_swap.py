"""A configuration of llama-swap as our three files, and notes on what has no equivalent. Pure; nothing is executed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from cortex.cli.importing import server_command
from cortex.wire.errors import shorten

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def table(header: str, values: Mapping[str, Any]) -> str:
    """A table, or an entry of an array of tables, such as `[[models]]`."""
    return "\n".join([header, *(f"{_key(name)} = {_value(value)}" for name, value in values.items())]) + "\n"


def comment(text: str) -> str:
    return "".join(f"# {line}\n" if line else "#\n" for line in text.splitlines())


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _text(name)


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return _text(value)
        case int() | float():
            return str(value)
        case date():  # which YAML reads where JSON has a text
            return _text(value.isoformat())
        case Mapping():
            inner = ", ".join(f"{_key(str(name))} = {_value(each)}" for name, each in value.items())
            return f"{{ {inner} }}" if inner else "{}"
        case Sequence():
            return f"[{', '.join(map(_value, value))}]"
    raise TypeError(f"TOML has no {type(value).__name__}")


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


_MACRO = re.compile(r"\$\{([^}]*)\}")
OURS = ("PORT", "MODEL_ID", "PID")
"""Those that a node replaces itself, under the same names."""


class MacroProblem(ValueError):
    """A macro that is not defined, or refers to itself."""


def expanded(value: Any, macros: Mapping[str, Any], kept: Mapping[str, str | None]) -> Any:
    """`value` with its macros replaced, in texts at any depth. `kept`: names that stay as they are (None), or that have
    this value. A text that is one macro gets the macro's value with its type. Raises MacroProblem."""
    return _Expander(macros, kept).value(value, ())


class _Expander:
    def __init__(self, macros: Mapping[str, Any], kept: Mapping[str, str | None]) -> None:
        self._macros = macros
        self._kept = kept

    def value(self, value: Any, inside: tuple[str, ...]) -> Any:
        match value:
            case str():
                whole = _MACRO.fullmatch(value)
                if whole is not None and whole[1] in self._macros and whole[1] not in inside:
                    return self.value(self._macros[whole[1]], (*inside, whole[1]))
                return _MACRO.sub(lambda found: self._text(found[1], inside), value)
            case list():
                return [self.value(each, inside) for each in value]
            case dict():
                return {self._key(name, inside): self.value(each, inside) for name, each in value.items()}
        return value

    def _key(self, name: Any, inside: tuple[str, ...]) -> str:
        return str(self.value(str(name), inside))

    def _text(self, name: str, inside: tuple[str, ...]) -> str:
        if name in inside:
            raise MacroProblem(f"the macro ${{{name}}} refers to itself")
        if name in self._macros:
            value = self.value(self._macros[name], (*inside, name))
            return str(value).lower() if isinstance(value, bool) else str(value)
        if name in self._kept:
            given = self._kept[name]
            return f"${{{name}}}" if given is None else given
        if name.startswith("env."):
            return f"${{{name}}}"
        raise MacroProblem(f"the macro ${{{name}}} is not defined")


_NODE = "local"
_MIN_HEALTH_S = 15.0
_LEVELS = {"debug": "debug", "info": "info", "warn": "warning", "error": "error"}
_DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_OF_FILE = frozenset({"models", "macros", "groups", "matrix", "hooks", "peers", "apiKeys", "logLevel"}) | {
    *("healthCheckTimeout", "globalTTL", "startPort", "routing")
}
_OF_MODEL = frozenset({"cmd", "cmdStop", "proxy", "checkEndpoint", "ttl", "env", "aliases", "useModelName"}) | {
    *("filters", "concurrencyLimit", "unloadTimeout", "healthCheckTimeout", "macros", "unlisted")
}


class NotLlamaSwap(ValueError):
    """The file cannot be imported; the message says why."""


@dataclass(slots=True)
class Imported:
    """Our files, as text, and what their reader must know."""

    files: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    num_models: int = 0


@dataclass(slots=True)
class _Model:
    """One model: its entry in `models.toml`, its harness and its entry in `neuron.toml`."""

    spec: dict[str, Any]
    harness: dict[str, Any]
    entry: dict[str, Any]
    aliases: list[str]


def convert(data: Any, name: str = "llama-swap.yaml") -> Imported:
    """`data`: the file as YAML has it. Raises NotLlamaSwap."""
    if not isinstance(data, dict) or not isinstance(data.get("models"), dict) or not data["models"]:
        raise NotLlamaSwap(f"{name} has no `models`, so it is no configuration of llama-swap")
    imported = Imported()
    note = imported.notes.append
    models = {str(model_id): _model(str(model_id), raw, data, note) for model_id, raw in data["models"].items()}
    _apply_groups(_mapping(data, "groups") or _mapping(_mapping(data, "routing"), "groups"), models, note)
    _apply_matrix(_mapping(data, "matrix") or _mapping(_mapping(data, "routing"), "matrix"), models, note)
    preload = _texts(_mapping(_mapping(data, "hooks"), "on_startup"), "preload")
    names = {alias: model_id for model_id, model in models.items() for alias in model.aliases}
    peers = [_peer(str(peer), raw, data, note) for peer, raw in _mapping(data, "peers").items()]
    if data.get("apiKeys"):
        note("apiKeys are not imported, because we store hashes only: make a key for each owner with `cortex keys add`")
    if rest := sorted(set(data) - _OF_FILE):
        note(f"without an equivalent, and left out: {', '.join(rest)}")
    known = _LEVELS.get(str(data.get("logLevel")))
    level = {} if known is None else {"log_level": known}
    head = comment(f"From {name}, by `cortex import`. Every key: docs/configuration.md")
    imported.num_models = len(models)
    imported.files = {
        "models.toml": "\n".join(
            [
                head,
                *(table("[[models]]", model.spec) for model in models.values()),
                *([table("[aliases]", names)] if names else []),
            ]
        ),
        "neuron.toml": "\n".join(
            [
                head + table("", {"listen": "127.0.0.1:13131", **level}).lstrip("\n"),
                *(table("[[harnesses]]", model.harness) for model in models.values()),
                *(table("[[models]]", model.entry) for model in models.values()),
                *(table("[[default_models]]", {"id": each}) for each in preload if each in models),
            ]
        ),
        "cortex.toml": "\n".join(
            [
                head,
                table("[gateway]", {"models": "models.toml", **level}),
                table("[[neurons]]", {"name": _NODE, "endpoint": "http://127.0.0.1:13131"}),
                *(table("[[neurons]]", peer) for peer in peers),
            ]
        ),
    }
    return imported


def _model(model_id: str, raw: Any, data: Mapping[str, Any], note: Any) -> _Model:
    if not isinstance(raw, dict) or not isinstance(raw.get("cmd"), str):
        raise NotLlamaSwap(f"the model {model_id} has no `cmd`")
    macros = {**_mapping(data, "macros"), **_mapping(raw, "macros")}
    kept = dict.fromkeys(OURS)
    named: dict[str, str | None] = {**kept, "MODEL_ID": model_id}
    try:
        command = str(expanded(server_command.without_comments(raw["cmd"]), macros, kept))
        stop = str(expanded(raw.get("cmdStop") or "", macros, kept))
        proxy = str(expanded(raw.get("proxy") or "http://localhost:${PORT}", macros, named))
        known = {key: value for key, value in raw.items() if key not in ("cmd", "cmdStop", "proxy", "macros")}
        options = expanded({key: known[key] for key in known if key in _OF_MODEL}, macros, named)
        server = server_command.read(command, proxy)
        cmd_stop = server_command.split(stop)
    except (MacroProblem, ValueError) as error:
        raise NotLlamaSwap(f"the model {model_id}: {error}") from error

    def noted(text: str) -> None:
        note(f"{model_id}: {text}")

    harness: dict[str, Any] = {"name": model_id, "cmd": server.argv}
    spec: dict[str, Any] = {"id": model_id, "harness": model_id, "only_on": [_NODE]}
    entry: dict[str, Any] = {"id": model_id, "harness": model_id}
    if cmd_stop:
        harness["cmd_stop"] = cmd_stop
    env = _environment(_texts(options, "env"), entry, spec, noted)
    if server.source is not None:
        entry["source"] = spec["source"] = server.source
        if server.source.startswith("./"):
            noted(f"the path {server.source} is relative to where the node is started; make it absolute")
    else:
        noted("its memory is unknown before the first load; add `memory_mb` to its harness in neuron.toml")
    if server.context_tokens is not None:
        entry["context_tokens"] = spec["context_tokens"] = server.context_tokens
    if server.replaced_port is not None:
        noted(f"the port {server.replaced_port} of its cmd is now ${{PORT}}, which the node chooses")
    elif not server.has_port and not any(server_command.PORT in value for value in env.values()):
        env["PORT"] = server_command.PORT
        noted("its cmd has no port: write ${PORT} where the server takes its port, in its harness in neuron.toml")
    if (host := re.sub(r"^https?://|[:/].*$", "", proxy)) not in ("localhost", "127.0.0.1", "[", "0.0.0.0"):
        noted(f"its proxy is at {host}; a node talks to its servers on the loopback address only")
    if env:
        harness["env"] = env
    harness["health"] = _health(options, data)
    if options.get("useModelName"):
        harness["upstream_model"] = str(options["useModelName"])
    aliases = _texts(options, "aliases")
    aliases += _filters(model_id, _mapping(options, "filters"), harness, noted)
    if (limit := int(_number(options, "concurrencyLimit"))) > 0:
        harness["max_concurrent"] = limit
    if (timeout_s := _number(options, "unloadTimeout")) > 0:
        harness["stop_timeout_s"] = timeout_s
    is_own = options.get("ttl", -1) not in (None, -1)
    if (ttl_s := _number(options, "ttl") if is_own else _number(data, "globalTTL")) > 0:
        spec["ttl_s"] = ttl_s
    if options.get("unlisted"):
        noted("unlisted has no equivalent: keys with `models` see and use only those")
    if rest := sorted(set(raw) - _OF_MODEL):
        noted(f"without an equivalent, and left out: {', '.join(rest)}")
    return _Model(spec, harness, entry, [alias for alias in dict.fromkeys(aliases) if alias != model_id])


def _health(options: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    timeout_s = _number(options, "healthCheckTimeout") or _number(data, "healthCheckTimeout") or 120.0
    return {
        "path": str(options.get("checkEndpoint") or "/health"),
        "timeout_s": max(_MIN_HEALTH_S, timeout_s),
    }


def _environment(lines: Iterable[str], entry: dict[str, Any], spec: dict[str, Any], noted: Any) -> dict[str, str]:
    """The variables, without those of devices, which the node sets: the model gets these devices."""
    env = dict(line.partition("=")[::2] for line in lines)
    for name in _DEVICE_VARIABLES:
        if (value := env.pop(name, None)) is None:
            continue
        indices = [part.strip() for part in value.split(",")]
        if all(part.isdigit() for part in indices):
            entry["devices"] = [int(part) for part in indices]
            if len(indices) > 1:
                entry["tensor_parallel"] = spec["tensor_parallel"] = len(indices)
        else:
            noted(f"{name}={value} is left out: give the indices of `neuron discover` as `devices` in neuron.toml")
    return env


def _filters(model_id: str, filters: Mapping[str, Any], harness: dict[str, Any], noted: Any) -> list[str]:
    """Sets and strips parameters. Returns more aliases."""
    stripped = _texts(filters, "stripParams") or _texts(filters, "strip_params")
    names = [name.strip() for text in stripped for name in text.split(",")]
    if names := [name for name in names if name and name != "model"]:
        harness["strip_params"] = names
    by_id = _mapping(filters, "setParamsByID")
    params = {**_mapping(filters, "setParams"), **_mapping(by_id, model_id)}
    values = {str(name): _without_null(value) for name, value in params.items() if name != "model"}
    if values := {name: value for name, value in values.items() if value is not None}:
        harness["set_params"] = values
    others = [name for name in by_id if name != model_id]
    for name in others:
        noted(f"{name} is an alias, without its setParamsByID: an alias has no parameters of its own")
    return others


def _without_null(value: Any) -> Any:
    """TOML has no null."""
    if isinstance(value, dict):
        return {name: _without_null(each) for name, each in value.items() if each is not None}
    return [_without_null(each) for each in value if each is not None] if isinstance(value, list) else value


def _apply_groups(groups: Mapping[str, Any], models: Mapping[str, _Model], note: Any) -> None:
    for name in groups:
        group = _mapping(groups, name)
        members = [models[each] for each in _texts(group, "members") if each in models]
        if group.get("persistent"):
            for member in members:
                member.spec["load"] = "pinned"
            note(f"the group {name} is persistent: its models are pinned, which also loads them at start")
        elif group.get("exclusive") is False:
            for member in members:
                member.spec["priority"] = -1
            note(f"the group {name} is not exclusive: its models have priority -1, so they evict no others")
        if group.get("swap", True) and len(members) > 1:
            note(f"the group {name} swaps: here its models are loaded together while there is memory for them")


def _apply_matrix(matrix: Mapping[str, Any], models: Mapping[str, _Model], note: Any) -> None:
    variables = {str(short): str(model_id) for short, model_id in _mapping(matrix, "vars").items()}
    costs = _mapping(matrix, "evict_costs")
    for short in costs:
        if (model := models.get(variables.get(str(short), str(short)))) is not None:
            model.spec["priority"] = int(_number(costs, short)) - 1
    if matrix:
        note("the sets of the matrix have no equivalent: models run together while there is memory for them")


def _peer(name: str, raw: Any, data: Mapping[str, Any], note: Any) -> dict[str, Any]:
    if not isinstance(raw, dict) or not raw.get("proxy"):
        raise NotLlamaSwap(f"the peer {name} has no `proxy`")
    try:
        raw = expanded(raw, _mapping(data, "macros"), {})
    except MacroProblem as error:
        raise NotLlamaSwap(f"the peer {name}: {error}") from error
    peer = {"name": name, "endpoint": str(raw["proxy"]).rstrip("/"), "kind": "openai"}
    if key := str(raw.get("apiKey") or ""):
        variable = re.fullmatch(r"\$\{env\.([^}]+)\}", key)
        peer["key_env"] = variable[1] if variable else re.sub(r"\W", "_", name).upper() + "_KEY"
        if variable is None:
            note(f"the peer {name}: its apiKey is not written; set {peer['key_env']} in the gateway's environment")
    if raw.get("models"):
        note(f"the peer {name}: its list of models is left out; the gateway asks the peer which models it has")
    if rest := sorted(set(raw) - {"proxy", "apiKey", "models"}):
        note(f"the peer {name}: without an equivalent, and left out: {', '.join(rest)}")
    return peer


def _mapping(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = data.get(name)
    return value if isinstance(value, dict) else {}


def _number(data: Mapping[str, Any], name: str) -> float:
    """0 if it is absent. Raises NotLlamaSwap."""
    try:
        number = float(data.get(name) or 0)
    except (TypeError, ValueError):
        raise NotLlamaSwap(f"`{name}` is {shorten(str(data[name]))}, which is no number") from None
    if not math.isfinite(number):
        raise NotLlamaSwap(f"`{name}` is {number}; give a finite number")
    return number


def _texts(data: Mapping[str, Any], name: str) -> list[str]:
    """A list, one text, or nothing. An entry that is a mapping counts by its `id`. Raises NotLlamaSwap."""
    given = data.get(name) or []
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, list):
        raise NotLlamaSwap(f"`{name}` is {shorten(str(given))}; give a list")
    return [str(each.get("id", "")) if isinstance(each, dict) else str(each) for each in given]
