"""The fields that Ollama's chat and generate requests share."""

from __future__ import annotations

import re

import msgspec

from cortex.wire.dialects.ollama.fields import OPTIONS
from cortex.wire.errors import MissingModel
from cortex.wire.fields.body import LARGEST_COUNT, Fields
from cortex.wire.fields.sampling import LOCAL, MAX_TOP_LOGPROBS, read_sampling
from cortex.wire.model_names import plain_name
from cortex.wire.pictures.parts import from_base64, from_url
from cortex.wire.request_summary import RequestSummary
from cortex.wire.requests import GenerateRequest, OutputFormat, PicturePart, Sampling, Thinking
from cortex.wire.tenant import read_tenant

_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "max": "high"}
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"[+-]?(?:\d+(?:\.\d*)?(?:ns|us|µs|ms|s|m|h))+")
_PART = re.compile(r"(\d+(?:\.\d*)?)(ns|us|µs|ms|s|m|h)")
_NUMBER = re.compile(r"[+-]?\d{1,12}(?:\.\d{1,12})?")
_MAX_DURATION_CHARACTERS = 64


def read_summary(fields: Fields, *, loads_only: bool) -> RequestSummary:
    """The summary, from the fields that both routes have. `loads_only`: it has no prompt. Raises `MissingModel` or
    `InvalidValue`."""
    options = fields.object("options") or Fields({}, "options")
    limit = options.integer("num_predict", low=-LARGEST_COUNT, high=LARGEST_COUNT)
    return RequestSummary(
        fields.model(),
        fields.flag("stream") is not False,
        limit if limit is not None and limit >= 0 else None,
        1,
        loads_only=loads_only,
        unloads=(keep_alive_s := read_keep_alive(fields)) == 0,
        keep_alive_s=keep_alive_s,
        context_tokens=_context_tokens(options),
    )


def read_request(fields: Fields, summary: RequestSummary) -> GenerateRequest:
    """A request without a prompt, from the fields that both routes have. Raises `InvalidValue`."""
    options = fields.object("options") or Fields({}, "options")
    unknown = tuple(f"options.{name}" for name in fields.mapping("options") or {} if name not in OPTIONS)
    model = plain_name(summary.model)
    if not model:
        raise MissingModel("The body names no model; set 'model' to a name that /api/tags lists.", param="model")
    return GenerateRequest(
        model=model,
        output=_read_format(fields),
        thinking=_read_think(fields),
        sampling=_read_options(fields, options, summary),
        most_context_tokens=_context_tokens(options),
        stream=summary.stream,
        include_usage=True,
        keep_alive_s=read_keep_alive(fields),
        loads_only=summary.loads_only,
        ignored_fields=(*fields.unknown, *unknown),
        tenant=read_tenant(fields),
    )


def _context_tokens(options: Fields) -> int | None:
    return options.integer("num_ctx", low=0, high=LARGEST_COUNT) or None


def _read_options(fields: Fields, options: Fields, summary: RequestSummary) -> Sampling:
    known = Fields({name: options.raw(name) for name in OPTIONS}, options.path)
    wanted = fields.flag("logprobs") or False
    top_logprobs = fields.integer("top_logprobs", low=0, high=MAX_TOP_LOGPROBS) or 0
    sampling = msgspec.structs.replace(
        read_sampling(known, LOCAL),
        max_tokens=summary.completion_limit,
        logprobs=wanted,
        top_logprobs=top_logprobs if wanted else 0,
    )
    if known.raw("repeat_last_n") == 0:
        return msgspec.structs.replace(sampling, repetition_penalty=1.0, repetition_window=None)
    return sampling


def _read_think(fields: Fields) -> Thinking:
    given = fields.raw("think")
    if given is None or isinstance(given, bool):
        return Thinking(enabled=given)
    if isinstance(given, str) and given in _EFFORTS:
        return Thinking(enabled=True, effort=_EFFORTS[given])
    raise fields.invalid("think", "use true, false, low, medium, high or max")


def _read_format(fields: Fields) -> OutputFormat | None:
    given = fields.raw("format")
    if given is None or given == "":
        return None
    if given == "json":
        return OutputFormat(kind="json_object", param="format")
    if isinstance(given, dict):
        return OutputFormat(kind="json_schema", schema=given, param="format")
    raise fields.invalid("format", 'use "json" or a JSON schema')


def read_keep_alive(fields: Fields) -> float | None:
    """Seconds, from a number or a text such as `5m`. A negative value, `for ever` to Ollama, is returned as it is."""
    given = fields.raw("keep_alive")
    if isinstance(given, str):
        seconds = duration_s(given)
        if seconds is None:
            raise fields.invalid("keep_alive", "use seconds, or a duration such as 5m or 1h30m")
        return seconds
    return fields.number("keep_alive", low=-LARGEST_COUNT, high=LARGEST_COUNT)


def duration_s(text: str) -> float | None:
    """The seconds of a text such as `5m`, `-1` or `1h30m`; None when it is not one."""
    text = text.strip()
    if len(text) > _MAX_DURATION_CHARACTERS:
        return None
    if _NUMBER.fullmatch(text):
        return float(text)
    if not _DURATION.fullmatch(text):
        return None
    seconds = sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(text))
    return -seconds if text.startswith("-") else seconds


def read_pictures(fields: Fields) -> tuple[PicturePart, ...]:
    """The pictures of `images`, which are base64 texts."""
    name = fields.param("images")
    return tuple(_picture(text, f"{name}[{number}]") for number, text in enumerate(fields.texts("images")))


def _picture(text: str, param: str) -> PicturePart:
    return from_url(text, param) if ":" in text[:16] else from_base64(text, "", param)
