"""Sampling and output-format fields of the OpenAI dialects and their usual extensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from cortex.wire.errors import InvalidValue, shorten
from cortex.wire.fields.body import LARGEST_COUNT, LARGEST_INTEGER, LARGEST_TOKEN, Fields
from cortex.wire.requests import OutputFormat, Sampling, Thinking

MAX_CHOICES = 128
DEFAULT_COMPLETION_TOKENS = 1024
"""Counted for each choice of a request that sets no limit of its own."""
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_TOKENS = 1024
MAX_LOGIT_BIASES = 1024
"""Limited, because every step of the batch applies all of them."""


class Bounds(NamedTuple):
    """The largest values that the API of a dialect accepts."""

    temperature: float
    penalty: float
    """The largest `presence_penalty` and `frequency_penalty`; the smallest is its negative."""


OPENAI = Bounds(temperature=2, penalty=2)
ANTHROPIC = Bounds(temperature=1, penalty=0)
LOCAL = Bounds(temperature=100, penalty=100)
"""Ollama and llama.cpp have no bounds: beyond these, nothing changes any more."""
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_VERBOSITIES = ("low", "medium", "high")
_MAX_TOKEN_DIGITS = len(str(LARGEST_TOKEN))


def read_sampling(fields: Fields, bounds: Bounds = OPENAI) -> Sampling:
    """The sampling fields that every OpenAI dialect spells alike: all but the counts of tokens, of choices and of
    log-probabilities. Raises `InvalidValue`."""
    top_k = fields.integer("top_k", low=-1, high=LARGEST_COUNT)
    penalty, window = "repetition_penalty", "repetition_window"
    if penalty not in fields:
        penalty = "repeat_penalty"
    if window not in fields:
        window = "repeat_last_n"
    repetition_window = fields.integer(window, low=-1, high=LARGEST_COUNT)
    sampling = Sampling(
        temperature=fields.number("temperature", low=0, high=bounds.temperature),
        top_k=0 if top_k == -1 else top_k,
        top_p=fields.number("top_p", low=0, high=1),
        min_p=fields.number("min_p", low=0, high=1),
        repetition_penalty=fields.number(penalty, low=MIN_REPETITION_PENALTY, high=MAX_REPETITION_PENALTY),
        repetition_window=0 if repetition_window == -1 else repetition_window,
        presence_penalty=fields.number("presence_penalty", low=-bounds.penalty, high=bounds.penalty),
        frequency_penalty=fields.number("frequency_penalty", low=-bounds.penalty, high=bounds.penalty),
        logit_bias=_read_logit_bias(fields),
        allowed_token_ids=_read_allowed(fields),
        seed=fields.integer("seed", low=-LARGEST_INTEGER, high=LARGEST_INTEGER),
        min_tokens=fields.integer("min_tokens", low=0, high=LARGEST_COUNT) or 0,
        ignore_eos=fields.flag("ignore_eos") or False,
        stop=read_stops(fields, "stop"),
        stop_token_ids=fields.integers("stop_token_ids", low=0, high=LARGEST_TOKEN, most=MAX_STOP_TOKENS),
        speculation=read_speculation(fields),
    )
    return _only_with(sampling, fields.texts("samplers"))


_WITHOUT_SAMPLER: Final[Mapping[str, Mapping[str, float]]] = {
    "penalties": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "temperature": {"temperature": 1.0},
}
"""llama.cpp's samplers → the values with which they change nothing."""


def _only_with(sampling: Sampling, samplers: Sequence[str]) -> Sampling:
    """`sampling` without the samplers missing from the client's list; an empty list keeps all. The order is fixed
    here."""
    left_out = [values for name, values in _WITHOUT_SAMPLER.items() if samplers and name not in samplers]
    unused = {name: value for values in left_out for name, value in values.items()}
    return msgspec.structs.replace(sampling, **unused) if unused else sampling


def read_speculation(fields: Fields) -> Literal["off"] | None:
    """Raises `InvalidValue`."""
    given = fields.text("speculation")
    if given not in (None, "off"):
        raise fields.invalid("speculation", "a request can only switch it `off`; the model's setting has the rest")
    return "off" if given else None


def read_limits(fields: Fields, *, fewest_tokens: int = 1) -> tuple[int | None, int]:
    """The most tokens and the number of choices, in the dialects that have several. `fewest_tokens`: the least value of
    `max_tokens` apart from -1, which is llama.cpp's for no limit."""
    is_limited = fields.raw("max_tokens") != -1
    max_tokens = fields.integer("max_tokens", low=fewest_tokens, high=LARGEST_COUNT) if is_limited else None
    if max_tokens is None and (limit := fields.integer("n_predict", low=-1, high=LARGEST_COUNT)) is not None:
        max_tokens = None if limit == -1 else limit
    return max_tokens, fields.integer("n", low=1, high=MAX_CHOICES) or 1


def read_prompt_logprobs(fields: Fields) -> int | None:
    wanted = fields.integer("prompt_logprobs", low=0, high=MAX_TOP_LOGPROBS)
    if wanted is not None and fields.flag("stream"):
        raise fields.invalid("prompt_logprobs", "a stream does not have them; set 'stream' to false")
    return wanted


def read_truncation(fields: Fields) -> int | None:
    """`truncate_prompt_tokens`: the tokens that are kept at the end of the prompt; -1: as many as fit."""
    kept = fields.integer("truncate_prompt_tokens", low=-1, high=LARGEST_COUNT)
    if kept == 0:
        raise fields.invalid("truncate_prompt_tokens", "a prompt has at least one token; send -1 for all that fit")
    return kept


def _read_allowed(fields: Fields) -> tuple[int, ...]:
    if fields.raw("allowed_token_ids") == []:
        raise fields.invalid("allowed_token_ids", "it allows no token; list at least one, or leave it out")
    return fields.integers("allowed_token_ids", low=0, high=LARGEST_TOKEN)


def read_stops(fields: Fields, name: str) -> tuple[str, ...]:
    """Stop strings without the empty ones, which some clients send for "none"."""
    stops = tuple(stop for stop in fields.texts(name) if stop)
    if len(stops) > MAX_STOPS:
        raise fields.invalid(name, f"at most {MAX_STOPS} stop strings are allowed, got {len(stops)}")
    return stops


def _read_logit_bias(fields: Fields) -> dict[int, float]:
    biases: dict[int, float] = {}
    bias_by_token = fields.object("logit_bias")
    for token in fields.mapping("logit_bias", most=MAX_LOGIT_BIASES) or {}:
        assert bias_by_token is not None
        is_number = token.isascii() and token.isdigit() and len(token) <= _MAX_TOKEN_DIGITS
        if not is_number or int(token) > LARGEST_TOKEN:
            raise bias_by_token.invalid(token, "keys are token ids")
        bias = bias_by_token.number(token, low=-100, high=100)
        biases[int(token)] = bias or 0.0
    return biases


def read_output_format(fields: Fields, response_format: Fields | None) -> OutputFormat | None:
    """The constraint on the output: the dialect's own format, or one of the extensions of self-hosted servers.

    Raises `InvalidValue` when two of them are given.
    """
    found: dict[str, OutputFormat] = {}
    if response_format is not None and (output := read_response_format(response_format)) is not None:
        found[response_format.path] = output
    if "json_schema" in fields:
        found["json_schema"] = OutputFormat(kind="json_schema", schema=_read_schema(fields, "json_schema"))
    if (regex := fields.text("regex")) is not None:
        found["regex"] = OutputFormat(kind="regex", text=regex)
    for name in ("grammar", "ebnf"):
        if grammar := fields.text(name):
            found[name] = OutputFormat(kind="grammar", text=grammar)
    for prefix, source in (("guided_", fields), ("", fields.object("structured_outputs"))):
        if source is not None:
            found |= {source.param(prefix + name): output for name, output in _read_guided(source, prefix).items()}
    if len(found) > 1:
        names = " and ".join(f"'{name}'" for name in found)
        raise InvalidValue(f"{names} both constrain the output; send one of them.", param=list(found)[1])
    return next((msgspec.structs.replace(output, param=param) for param, output in found.items()), None)


def _read_guided(fields: Fields, prefix: str) -> dict[str, OutputFormat]:
    found: dict[str, OutputFormat] = {}
    if prefix + "json" in fields:
        found["json"] = OutputFormat(kind="json_schema", schema=_read_schema(fields, prefix + "json"))
    if fields.flag(prefix + "json_object"):
        found["json_object"] = OutputFormat(kind="json_object")
    if (regex := fields.text(prefix + "regex")) is not None:
        found["regex"] = OutputFormat(kind="regex", text=regex)
    if (grammar := fields.text(prefix + "grammar")) is not None:
        found["grammar"] = OutputFormat(kind="grammar", text=grammar)
    if choices := fields.texts(prefix + "choice"):
        found["choice"] = OutputFormat(kind="choice", choices=choices)
    return found


def read_response_format(fields: Fields) -> OutputFormat | None:
    """The object of `response_format` (nested schema) and of the Responses API's `text.format` (flat schema)."""
    kind = fields.text("type")
    if kind is None:
        raise fields.invalid("type", "it is required: text, json_object or json_schema")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = fields.mapping("schema")
        return OutputFormat(kind="json_schema" if schema else "json_object", schema=schema or None, param=fields.path)
    if kind == "json_schema":
        holder = fields.object("json_schema") or fields
        if "schema" not in holder:
            is_nested = holder is fields and fields.path == "response_format"
            raise holder.invalid("json_schema" if is_nested else "schema", "a json_schema format needs a schema")
        return OutputFormat(kind="json_schema", schema=_read_schema(holder, "schema"), param=fields.path)
    raise fields.invalid("type", f"'{shorten(kind)}' is not known; use text, json_object or json_schema")


def _read_schema(fields: Fields, name: str) -> dict[str, object]:
    value = fields.raw(name)
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.MsgspecError, RecursionError) as problem:
            raise fields.invalid(name, f"the schema is not JSON: {shorten(str(problem))}") from None
    if isinstance(value, bool):
        return {} if value else {"not": {}}
    if not isinstance(value, dict):
        raise fields.invalid(name, "expected a JSON schema")
    return value


def check_verbosity(fields: Fields) -> None:
    """A hint without effect. Raises `InvalidValue` for one that is none."""
    verbosity = fields.text("verbosity")
    if verbosity is not None and verbosity not in _VERBOSITIES:
        raise fields.invalid("verbosity", f"'{shorten(verbosity)}' is not known; use {', '.join(_VERBOSITIES)}")


def read_effort(fields: Fields, name: str) -> Thinking:
    """An effort enables reasoning, except `none`, which disables it. Raises `InvalidValue`."""
    effort = fields.text(name)
    if effort is None:
        return Thinking()
    if effort not in EFFORTS:
        raise fields.invalid(name, f"'{shorten(effort)}' is not known; use {', '.join(EFFORTS)}")
    return Thinking(enabled=effort != "none", effort=effort)


def read_stream_options(fields: Fields) -> Fields | None:
    """Raises `InvalidValue` for options of a stream that the client does not ask for."""
    options = fields.object("stream_options")
    if options is not None and not fields.flag("stream"):
        raise fields.invalid("stream_options", "only a stream has options; set 'stream' to true, or leave them out")
    return options
