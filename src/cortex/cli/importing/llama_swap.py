"""Converts a llama-swap configuration to our three files, with notes on what has no equivalent. Pure; nothing is
executed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from cortex.cli.importing import matrix_sets, server_command
from cortex.wire.errors import shorten
from cortex.wire.preset import ROUTED_FIELDS

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
"""Macros that a node expands itself, under the same names."""


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
_LISTEN = "127.0.0.1:31313"
"""Where a gateway starts without keys."""
_MIN_HEALTH_S = 15.0
_LEVELS = {"debug": "debug", "info": "info", "warn": "warning", "error": "error"}
_DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_Keys = dict[str, "_Keys | bool"]
"""The keys of a table; `*` is any name. For other keys, whether they are converted or left out."""


def _keys(*, converted: str = "", left_out: str = "", **tables: _Keys) -> _Keys:
    return {**dict.fromkeys(converted.split(), True), **dict.fromkeys(left_out.split(), False), **tables}


_TIMEOUTS = _keys(left_out="connect keepalive responseHeader tlsHandshake expectContinue idleConn")
_GROUPS: _Keys = {"*": _keys(converted="swap exclusive persistent members")}
_MATRIX = _keys(converted="vars evict_costs sets")
_MODEL = _keys(
    converted="cmd cmdStop proxy checkEndpoint healthCheckTimeout ttl unloadTimeout env aliases useModelName macros "
    "concurrencyLimit name description unlisted metadata sendLoadingState",
    filters=_keys(converted="stripParams strip_params setParams setParamsByID"),
    capabilities=_keys(converted="in out tools reranker context"),
    compat=_keys(left_out="ignoreWebsockets"),
    timeouts=_TIMEOUTS,
)
_PEER = _keys(
    converted="proxy apiKey models", filters=_keys(converted="stripParams strip_params setParams"), timeouts=_TIMEOUTS
)
_SELECTOR = _keys(
    converted="strategy targets",
    left_out="name description unlisted metadata",
    settings=_keys(left_out="spillover"),
)
KEYS = _keys(
    converted="macros apiKeys logLevel healthCheckTimeout globalTTL unloadTimeout sendLoadingState",
    left_out="startPort logRequests logTimeFormat logToStdout metricsMaxInMemory captureBuffer includeAliasesInList",
    store=_keys(left_out="path"),
    ui=_keys(activity=_keys(left_out="session_id")),
    performance=_keys(left_out="disabled every"),
    upstream=_keys(left_out="ignorePaths"),
    hooks=_keys(on_startup=_keys(converted="preload")),
    profiles={"*": _keys(left_out="description pins")},
    selectors={"*": _SELECTOR},
    models={"*": _MODEL},
    groups=_GROUPS,
    matrix=_MATRIX,
    routing=_keys(
        router=_keys(converted="use", settings=_keys(groups=_GROUPS, matrix=_MATRIX)),
        scheduler=_keys(converted="use", settings=_keys(fifo=_keys(converted="priority"))),
    ),
    peers={"*": _PEER},
)
"""Every key that llama-swap reads, deprecated ones included."""


def _left_out(data: Any, keys: _Keys, path: str = "") -> list[str]:
    """The paths without an equivalent. Raises NotLlamaSwap for an unknown key, whose meaning would be lost, and for a
    value that should be a table."""
    if data is None:
        return []
    if not isinstance(data, dict):
        raise NotLlamaSwap(f"`{path}` is {shorten(str(data))}; give a mapping")
    found: list[str] = []
    for name, value in data.items():
        here, known = f"{path}.{name}" if path else str(name), keys.get(str(name), keys.get("*"))
        if known is None and not str(name).startswith("x-"):  # which other programs take for the user's own
            raise NotLlamaSwap(f"`{here}` is not a known llama-swap key; correct it, or remove it")
        if isinstance(known, dict):
            found += _left_out(value, known, here)
        elif not known:
            found.append(here)
    return found


class NotLlamaSwap(ValueError):
    """The file cannot be imported; the message says why."""


@dataclass(slots=True)
class Imported:
    """Our files, as text, and notes for the user."""

    files: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    num_models: int = 0


@dataclass(slots=True)
class _Model:
    """One model: its entry in `models.toml`, its harness and its entry in `neuron.toml`."""

    spec: dict[str, Any]
    harness: dict[str, Any]
    entry: dict[str, Any]
    aliases: dict[str, dict[str, Any]]
    """Aliases, with their parameters."""


def convert(data: Any, name: str = "llama-swap.yaml") -> Imported:
    """`data`: the file as YAML has it. Raises NotLlamaSwap."""
    if not isinstance(data, dict) or not isinstance(data.get("models"), dict) or not data["models"]:
        raise NotLlamaSwap(f"{name} is not a llama-swap configuration: it has no `models`")
    imported = Imported()
    note = imported.notes.append
    left_out = _left_out(data, KEYS)
    models = {str(model_id): _model(str(model_id), raw, data, note) for model_id, raw in data["models"].items()}
    exclusion = _apply_routing(data, models, note)
    names = {alias: model_id for model_id, model in models.items() for alias in model.aliases}
    presets = {alias: params for model in models.values() for alias, params in model.aliases.items() if params}
    peers = [_peer(str(peer), raw, data, note) for peer, raw in _mapping(data, "peers").items()]
    names |= _selectors(_mapping(data, "selectors"), models, names, note)
    names |= _peer_names(peers, {*models, *names}, note)
    wanted = _texts(_mapping(_mapping(data, "hooks"), "on_startup"), "preload")
    preload = list(dict.fromkeys(names.get(each, each) for each in wanted))
    if absent := [each for each in preload if each not in models]:
        note(f"not loaded at start, because there are no such models: {', '.join(absent)}")
    if data.get("apiKeys"):
        note("apiKeys are not imported, as only hashes are stored: make a key for each owner with `cortex keys add`")
    note(f"the gateway listens on {_LISTEN}; for clients on other hosts make keys, and remove `listen` in cortex.toml")
    if left_out:
        note(f"without an equivalent, and left out: {', '.join(left_out)}")
    known = _LEVELS.get(str(data.get("logLevel")))
    level = {} if known is None else {"log_level": known}
    loading = {"loading_state": "reasoning"} if data.get("sendLoadingState") else {}
    head = comment(f"From {name}, by `cortex import`. Every key: docs/configuration.md")
    imported.num_models = len(models)
    imported.files = {
        "models.toml": "\n".join(
            [
                head,
                *exclusion.get("together", ()),
                *(table("[[models]]", model.spec) for model in models.values()),
                *exclusion.get("groups", ()),
                *([table("[aliases]", _with_presets(names, presets))] if names else []),
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
                table("[gateway]", {"listen": _LISTEN, "models": "models.toml", **loading, **level}),
                *([table("[eviction]", {"ttl_s": ttl_s})] if (ttl_s := _number(data, "globalTTL")) > 0 else []),
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
        options = expanded({key: known[key] for key in known if _MODEL.get(key)}, macros, named)
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
    capabilities = _mapping(options, "capabilities")
    if context_tokens := server.context_tokens or int(_number(capabilities, "context")):
        entry["context_tokens"] = spec["context_tokens"] = context_tokens
    if can := _capabilities(capabilities, noted):
        spec["capabilities"] = can
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
    aliases: dict[str, dict[str, Any]] = {alias: {} for alias in _texts(options, "aliases")}
    aliases |= _filters(model_id, _mapping(options, "filters"), harness, spec, noted)
    if (limit := int(_number(options, "concurrencyLimit"))) > 0:
        harness["max_concurrent"] = spec["max_requests"] = limit
    if isinstance(shown := options.get("sendLoadingState"), bool):
        spec["loading_state"] = "reasoning" if shown else "comment"
    if metadata := _without_null(_mapping(options, "metadata")):
        if any(server_command.PORT in str(value) for value in metadata.values()):
            noted("metadata that names ${PORT} keeps it as text, because the node chooses the port at each start")
        spec["metadata"] = metadata
    if (timeout_s := _number(options, "unloadTimeout") or _number(data, "unloadTimeout")) > 0:
        harness["stop_timeout_s"] = timeout_s
    if options.get("ttl", -1) not in (None, -1) and (_number(options, "ttl") or _number(data, "globalTTL")):
        spec["ttl_s"] = _number(options, "ttl")
    about = {"display_name": options.get("name"), "description": options.get("description")}
    spec |= {key: str(text) for key, text in about.items() if text}
    if options.get("unlisted"):
        spec["unlisted"] = True
    aliases.pop(model_id, None)
    return _Model(spec, harness, entry, aliases)


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


def _capabilities(given: Mapping[str, Any], noted: Any) -> list[str]:
    """In our terms."""
    reads, writes = _texts(given, "in"), _texts(given, "out")
    found = {
        "chat": "text" in writes,
        "tools": bool(given.get("tools")),
        "vision": "image" in reads,
        "rerank": bool(given.get("reranker")),
    }
    others = [f"in {each}" for each in reads if each not in ("text", "image")]
    if others := [*others, *(f"out {each}" for each in writes if each != "text")]:
        noted(f"capabilities without an equivalent, and left out: {', '.join(others)}")
    return [name for name, is_there in found.items() if is_there]


def _filters(
    model_id: str, filters: Mapping[str, Any], harness: dict[str, Any], spec: dict[str, Any], noted: Any
) -> dict[str, dict[str, Any]]:
    """Sets and strips parameters. Returns more aliases, with their parameters."""
    by_id = _mapping(filters, "setParamsByID")
    always = _mapping(filters, "setParams")
    names = {model_id: {}, **{str(name): _mapping(by_id, name) for name in by_id}}
    varied = {field for name, params in names.items() for field in params if name != model_id}
    alike = {name: value for name, value in {**always, **names[model_id]}.items() if name not in varied}
    harness |= _parameters(filters, alike, frozenset({"model"}))
    found = {}
    for name, params in names.items():  # values of the harness would replace those of a name
        values = _parameters({}, {**{key: always[key] for key in always if key in varied}, **params}, ROUTED_FIELDS)
        found[name] = {key: value for key, value in values.get("set_params", {}).items() if key not in alike}
        if fixed := sorted((ROUTED_FIELDS - {"model"}) & set(params)):
            noted(f"{name} does not set {', '.join(fixed)}, which the gateway itself reads")
    if own := found.pop(model_id):
        spec["preset"] = {"set_params": own}
    return found


def _with_presets(names: Mapping[str, str], presets: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Each alias as our file has it."""
    return {
        name: {"model": model, "set_params": presets[name]} if name in presets else model
        for name, model in names.items()
    }


def _parameters(filters: Mapping[str, Any], params: Mapping[str, Any], without: frozenset[str]) -> dict[str, Any]:
    """The parameters that filters become here."""
    names = [name for name in _stripped(filters) if name not in without]
    values = {str(name): _without_null(value) for name, value in params.items() if name not in without}
    values = {name: value for name, value in values.items() if value is not None}
    return ({"strip_params": names} if names else {}) | ({"set_params": values} if values else {})


def _stripped(filters: Mapping[str, Any]) -> list[str]:
    """The parameters that filters remove."""
    given = _texts(filters, "stripParams") or _texts(filters, "strip_params")
    return [name.strip() for text in given for name in text.split(",") if name.strip()]


def _without_null(value: Any) -> Any:
    """TOML has no null."""
    if isinstance(value, dict):
        return {name: _without_null(each) for name, each in value.items() if each is not None}
    return [_without_null(each) for each in value if each is not None] if isinstance(value, list) else value


def _apply_routing(data: Mapping[str, Any], models: Mapping[str, _Model], note: Any) -> dict[str, list[str]]:
    """Groups, the matrix and priorities, below `routing` or where older files have them. Returns the groups and the
    sets of models as parts of our file."""
    router, scheduler = (_mapping(_mapping(data, "routing"), name) for name in ("router", "scheduler"))
    settings, engine = _mapping(router, "settings"), str(router.get("use") or "group")
    if engine not in ("group", "matrix"):
        raise NotLlamaSwap(f"`routing.router.use` is {shorten(engine)}; give group or matrix")
    if str(scheduler.get("use") or "fifo") != "fifo":
        raise NotLlamaSwap(f"`routing.scheduler.use` is {shorten(str(scheduler['use']))}; give fifo")
    unused = "groups" if engine == "matrix" else "matrix"
    if settings.get(unused):
        note(f"routing.router.settings.{unused} is left out: routing.router.use is {engine}")
    groups = _mapping(data, "groups") or (_mapping(settings, "groups") if engine == "group" else {})
    matrix = _mapping(data, "matrix") or (_mapping(settings, "matrix") if engine == "matrix" else {})
    found = {"together": _sets(matrix, models, note)} if matrix else {"groups": _swap_groups(groups, models, note)}
    priorities = _mapping(_mapping(_mapping(scheduler, "settings"), "fifo"), "priority")
    for name in models.keys() & priorities.keys():
        models[name].spec["queue_priority"] = int(_number(priorities, name))
    if absent := [name for name in priorities if name not in models]:
        note(f"priorities of unknown models are left out: {', '.join(absent)}")
    return found


def _selectors(
    selectors: Mapping[str, Any], models: Mapping[str, _Model], names: Mapping[str, str], note: Any
) -> dict[str, str]:
    """Each as an alias of its first target that is a model here."""
    found: dict[str, str] = {}
    for name in selectors:
        selector = _mapping(selectors, name)
        targets = [names.get(each, each) for each in _texts(selector, "targets")]
        strategy = str(selector.get("strategy"))
        if (target := next((each for each in targets if each in models), None)) is None:
            note(f"the selector {name} is left out: none of its targets is a model of this file")
            continue
        found[name] = target
        others = [each for each in targets if each != target]
        if strategy != "pin" or targets[0] != target:
            note(f"the selector {name} is an alias of {target}, without {strategy} and {', '.join(others) or 'others'}")
    return found


def _peer_names(peers: Iterable[Mapping[str, Any]], taken: set[str], note: Any) -> dict[str, str]:
    """PEER/MODEL as another name for each model that only one peer has."""
    of: dict[str, list[str]] = {}
    for peer in peers:
        for model in peer.get("models", ()):
            of.setdefault(model, []).append(peer["name"])
    found: dict[str, str] = {}
    for model, names in of.items():
        if model in taken or len(names) > 1:
            note(f"the model {model} is on several nodes, which share its requests: {', '.join(names)}")
        else:
            found |= {name: model for name in (f"{names[0]}/{model}",) if name not in taken}
    return found


def _swap_groups(groups: Mapping[str, Any], models: Mapping[str, _Model], note: Any) -> list[str]:
    """Tables of our groups. Models without a group are loaded together as memory permits; llama-swap swaps them only
    because it does not measure memory."""
    found: list[str] = []
    grouped: set[str] = set()
    for name in groups:
        group = _mapping(groups, name)
        named = _texts(group, "members")
        if absent := [each for each in named if each not in models]:
            note(f"the group {name} has members that are not models: {', '.join(absent)}")
        if twice := [each for each in named if each in grouped]:
            note(f"the group {name} is without {', '.join(twice)}: a model is in one group")
        if members := [each for each in named if each in models and each not in grouped]:
            grouped |= set(members)
            swap, exclusive = (bool(group.get(key, True)) for key in ("swap", "exclusive"))
            values = {"members": members, "swap": swap, "exclusive": exclusive}
            values |= {"persistent": True} if group.get("persistent") else {}
            found.append(table(f"[swap_groups.{_key(str(name))}]", values))
    return found


def _sets(matrix: Mapping[str, Any], models: Mapping[str, _Model], note: Any) -> list[str]:
    """The sets of models that may run together, as our key; costs go to the models."""
    variables = {str(short): str(model_id) for short, model_id in _mapping(matrix, "vars").items()}
    costs = _mapping(matrix, "evict_costs")
    for short in costs:
        if (model := models.get(variables.get(str(short), str(short)))) is not None:
            model.spec["evict_cost"] = _number(costs, short)
        else:
            note(f"the cost of {short} in the matrix is left out: it is not a model")
    expressions = {str(name): str(text) for name, text in _mapping(matrix, "sets").items()}
    found: list[list[str]] = []
    for name in expressions:
        try:
            sets = matrix_sets.expanded(name, expressions)
        except matrix_sets.MatrixProblem as error:
            raise NotLlamaSwap(str(error)) from error
        for members in sets:
            ids = [variables.get(each, each) for each in members]
            if absent := [each for each in ids if each not in models]:
                note(f"the set {name} of the matrix names unknown models: {', '.join(absent)}")
            if (known := [each for each in dict.fromkeys(ids) if each in models]) and known not in found:
                found.append(known)
    return [f"together = {_value(found)}\n"] if found else []


def _peer(name: str, raw: Any, data: Mapping[str, Any], note: Any) -> dict[str, Any]:
    if not isinstance(raw, dict) or not raw.get("proxy"):
        raise NotLlamaSwap(f"the peer {name} has no `proxy`")
    try:
        raw = expanded(raw, _mapping(data, "macros"), {})
    except MacroProblem as error:
        raise NotLlamaSwap(f"the peer {name}: {error}") from error
    peer: dict[str, Any] = {"name": name, "endpoint": str(raw["proxy"]).rstrip("/"), "kind": "openai"}
    if key := str(raw.get("apiKey") or ""):
        variable = re.fullmatch(r"\$\{env\.([^}]+)\}", key)
        peer["key_env"] = variable[1] if variable else re.sub(r"\W", "_", name).upper() + "_KEY"
        if variable is None:
            note(f"the peer {name}: its apiKey is not written; set {peer['key_env']} in the gateway's environment")
    if models := _texts(raw, "models"):
        peer["models"] = models
    filters = _mapping(raw, "filters")
    given = {*_mapping(filters, "setParams"), *_stripped(filters)}
    if fixed := sorted((ROUTED_FIELDS - {"model"}) & given):
        note(f"the peer {name}: its filters of {', '.join(fixed)} are left out: the gateway reads these itself")
    return peer | _parameters(filters, _mapping(filters, "setParams"), ROUTED_FIELDS)


def _mapping(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = data.get(name)
    return value if isinstance(value, dict) else {}


def _number(data: Mapping[str, Any], name: str) -> float:
    """0 if it is absent. Raises NotLlamaSwap."""
    try:
        number = float(data.get(name) or 0)
    except (TypeError, ValueError):
        raise NotLlamaSwap(f"`{name}` is {shorten(str(data[name]))}, which is not a number") from None
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
