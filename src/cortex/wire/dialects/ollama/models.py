"""The bodies of Ollama's `/api/tags`, `/api/ps`, `/api/show` and `/api/pull`. Clients require every field of them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from cortex.wire.dialects.ollama import modelfile
from cortex.wire.dialects.ollama.lines import stream_error, timestamp
from cortex.wire.errors import BodyTooLarge, CortexError, InvalidValue, MissingModel
from cortex.wire.fields import body as wire_body
from cortex.wire.fields.body import MAX_MODEL_NAME
from cortex.wire.model_names import check_name, plain_name
from cortex.wire.node.protocol import Capabilities, ModelState, ModelStatus, Progress, StoredForm
from cortex.wire.preset import Preset

VERSION = "0.33.0"
"""The version of Ollama whose API this is. Clients ask for a minimum."""
PORT = 11434
"""The port where clients look for an Ollama server by default."""
RUNNING = "Ollama is running"
"""The text of Ollama's `/`."""
NEVER = "9999-12-31T23:59:59Z"
"""Placeholder expiry of a model without a `ttl_s`, which is unloaded on demand."""

CREATING = ("create", "copy")
"""Routes that make models from others, at gateways only."""
ABSENT = ("push",)
"""Routes that have no meaning here."""
BLOBS_PREFIX = "/api/blobs/"
BLOBS = tuple(f"{BLOBS_PREFIX}sha256{mark}{{digest:[0-9a-f]{{64}}}}" for mark in ":-")
"""Routes of the files that models are made from."""

_MAX_BODY_BYTES = 64 * 1024
_OPTION_NAMES = {
    "repetition_penalty": "repeat_penalty",
    "repetition_window": "repeat_last_n",
    "max_tokens": "num_predict",
}
"""Sampling parameters that Ollama calls differently."""
_PARAMETERS = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)([bBmM])(?![A-Za-z0-9])")


@dataclass(frozen=True, slots=True)
class OllamaModel:
    """The facts about one model in the listings."""

    name: str
    created: float
    """The models have no dates of their own: Unix time of the server's start."""
    num_bytes: int = 0
    """On disk; 0: unknown."""
    device_bytes: int = 0
    """On devices now."""
    vram_bytes: int = 0
    """The part of `device_bytes` that is not host memory."""
    is_loaded: bool = False
    family: str = ""
    quant: str | None = None
    """The quantisation in memory; None if dense."""
    stored: StoredForm | None = None
    """None if its files are unknown."""
    files_digest: str | None = None
    context_tokens: int | None = None
    capabilities: Capabilities = field(default_factory=Capabilities)
    parameters: tuple[tuple[str, float], ...] = ()
    """Its sampling defaults."""
    expires_at: float | None = None
    """Unix time at which it is unloaded unless a request comes; None without such a time."""
    template: str = ""
    """Its chat template; empty if unknown."""
    source: str = ""
    """The model from which it was made; empty if none."""
    preset: Preset = field(default_factory=Preset)
    """The fields that its name adds to requests."""
    license: str = ""

    @property
    def digest(self) -> str:
        """That of its files, where they are known: equal for the same model under several names, and on several
        nodes."""
        return digest(self.files_digest or self.name, self.quant)


def is_for_ollama(host: str | None, user_agent: str | None) -> bool:
    """Whether a client expects Ollama: one of Ollama's own (its CLI, ollama-python, ollama-js), or one on Ollama's
    port."""
    is_own_client = user_agent is not None and user_agent.lower().startswith("ollama")
    return is_own_client or (host is not None and host.endswith(f":{PORT}"))


def digest(name: str, quant: str | None) -> str:
    """Identifies a model and its form. Ollama's is the hash of a manifest; models have none here."""
    return hashlib.sha256(f"{name}\n{quant}".encode()).hexdigest()


def read_name(body: bytes) -> str:
    """The model that a request about models names, as we spell it. Raises BodyTooLarge, MalformedJSON or
    MissingModel."""
    if len(body) > _MAX_BODY_BYTES:
        raise BodyTooLarge(f"The body has {len(body)} bytes; a request about a model has at most {_MAX_BODY_BYTES}.")
    fields = wire_body.parse(body)
    name = plain_name(fields.text("model") or fields.text("name") or "")
    if not name:
        raise MissingModel("The body names no model; set 'model' to a name that /api/tags lists.", param="model")
    if len(name) > MAX_MODEL_NAME:
        raise InvalidValue(f"A model's name has at most {MAX_MODEL_NAME} characters.", param="model")
    check_name(name, "model")
    return name


def absence(path: str) -> str:
    """The reason for a missing route, for an error."""
    has_meaning = path != "/api/push"
    reason = (
        "a node has no catalogue; send it to a gateway"
        if has_meaning
        else "models are not uploaded from here; use the tools of the hub"
    )
    return f"{path} is not implemented: {reason}."


def from_status(
    status: ModelStatus,
    created: float,
    *,
    name: str | None = None,
    device_bytes: int | None = None,
    vram_bytes: int | None = None,
    capabilities: Capabilities | None = None,
    context_tokens: int | None = None,
    expires_at: float | None = None,
    files_digest: str | None = None,
) -> OllamaModel:
    """A model as its node describes it. What else is given takes precedence; `context_tokens` where the node reports
    none. `vram_bytes`: all of `device_bytes` if absent."""
    sampling = ((field, getattr(status.sampling, field)) for field in status.sampling.__struct_fields__)
    in_memory = status.measured_bytes or status.estimate_bytes or 0
    device_bytes = in_memory if device_bytes is None else device_bytes
    return OllamaModel(
        name=name or status.id,
        created=created,
        num_bytes=status.file_bytes or status.disk_bytes or 0,
        device_bytes=device_bytes,
        vram_bytes=device_bytes if vram_bytes is None else vram_bytes,
        is_loaded=status.state is ModelState.READY,
        family=status.family or "",
        quant=status.quant,
        stored=status.stored,
        files_digest=files_digest or status.content_digest or status.digest,
        context_tokens=status.context_tokens or context_tokens,
        capabilities=capabilities or status.capabilities,
        parameters=tuple((field, value) for field, value in sampling if value is not None),
        expires_at=expires_at,
    )


def tags(models: Iterable[OllamaModel]) -> dict[str, Any]:
    return {"models": [_entry(model) | {"capabilities": _capabilities(model)} for model in models]}


def loaded(models: Iterable[OllamaModel]) -> dict[str, Any]:
    """`/api/ps`: the models that are on devices now."""
    return {
        "models": [
            {name: value for name, value in _entry(model).items() if name != "modified_at"}
            | {
                "size": model.device_bytes,
                "size_vram": model.vram_bytes,
                "expires_at": NEVER if model.expires_at is None else timestamp(model.expires_at),
                "context_length": model.context_tokens or 0,
            }
            for model in models
            if model.is_loaded
        ]
    }


def show(model: OllamaModel) -> dict[str, Any]:
    architecture = model.family or "unknown"
    information: dict[str, Any] = {"general.architecture": architecture, "general.basename": model.name}
    if model.context_tokens is not None:
        information[f"{architecture}.context_length"] = model.context_tokens
    if model.stored is not None and model.stored.num_parameters is not None:
        information["general.parameter_count"] = model.stored.num_parameters
    preset = model.preset
    said = {"system": preset.system, "messages": [*preset.messages]}
    return {
        "license": model.license,
        "modelfile": modelfile.as_text(
            model.name, model.source or model.name, preset, model.context_tokens, model.license
        ),
        "parameters": _parameters(model),
        "template": model.template,
        **{name: value for name, value in said.items() if value},
        "details": _details(model),
        "model_info": information,
        "capabilities": _capabilities(model),
        "modified_at": timestamp(model.created),
    }


def _parameters(model: OllamaModel) -> str:
    """Under Ollama's names, one per line."""
    context = () if model.context_tokens is None else (("num_ctx", model.context_tokens),)
    own = {**dict(model.parameters), **model.preset.default_params, **model.preset.set_params}
    values = ((name, each) for name, value in own.items() for each in (value if isinstance(value, list) else [value]))
    named = ((_OPTION_NAMES.get(name, name), value) for name, value in values)
    return "\n".join(f"{name:<30} {_parameter(value)}" for name, value in (*context, *named))


def _parameter(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return f"{value:.10g}" if isinstance(value, int | float) else wire_body.json_text(value)


def pull_progress(digest: str, progress: Progress | None) -> dict[str, Any]:
    """One line of a download in progress."""
    if progress is None or progress.stage != "download" or not progress.total_bytes:
        return {"status": "pulling manifest"}
    return {
        "status": f"pulling {digest[:12]}",
        "digest": f"sha256:{digest}",
        "total": progress.total_bytes,
        "completed": min(progress.done_bytes, progress.total_bytes),
    }


def pull_end(error: CortexError | None) -> bytes:
    """The last line of a download."""
    return stream_error(error) if error is not None else msgspec.json.encode({"status": "success"}) + b"\n"


def _entry(model: OllamaModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": timestamp(model.created),
        "size": model.num_bytes,
        "digest": model.digest,
        "details": _details(model),
    }


def _details(model: OllamaModel) -> dict[str, Any]:
    return {
        "parent_model": model.source,
        "format": model.stored.file_format if model.stored is not None else "",
        "family": model.family,
        "families": [model.family] if model.family else [],
        "parameter_size": _parameter_size(model),
        "quantization_level": (model.quant or (model.stored.dtype if model.stored is not None else "")).upper(),
    }


def _parameter_size(model: OllamaModel) -> str:
    """As its files say, else as its name does, else empty."""
    if model.stored is not None and model.stored.num_parameters:
        number = model.stored.num_parameters
        return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.2f}M"
    found = _PARAMETERS.findall(model.name)
    return f"{found[0][0]}{found[0][1].upper()}" if found else ""


def _capabilities(model: OllamaModel) -> list[str]:
    has = model.capabilities
    named = {
        "completion": has.chat,
        "tools": has.tools,
        "insert": has.insert,
        "vision": has.vision,
        "embedding": has.embeddings,
        "thinking": has.reasoning,
    }
    return [name for name, is_there in named.items() if is_there]
