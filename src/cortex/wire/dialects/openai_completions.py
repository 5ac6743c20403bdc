"""The OpenAI completions dialect: continues a raw prompt, without template and tools."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from cortex.wire.dialects.dialect import Dialect
from cortex.wire.dialects.openai_chunks import (
    SYSTEM_FINGERPRINT,
    ChunkEncoder,
    prompt_logprobs_body,
    stream_error,
    timings_body,
    usage_body,
)
from cortex.wire.error_encoding import from_code
from cortex.wire.events import (
    AnyEvent,
    Failure,
    Finish,
    Logprobs,
    ReasoningDelta,
    Start,
    TextDelta,
    TokenIds,
    TokenLogprob,
    UsageSoFar,
)
from cortex.wire.fields.body import MAX_PROMPTS, Fields, PromptIds
from cortex.wire.fields.request_class import asked_class
from cortex.wire.fields.sampling import (
    MAX_CHOICES,
    MAX_TOP_LOGPROBS,
    read_limits,
    read_output_format,
    read_prompt_logprobs,
    read_sampling,
    read_stream_options,
    read_truncation,
)
from cortex.wire.fields.tables.shared import ACCOUNT, EXTENSIONS, OUTPUT, PROMPT, SAMPLING, STREAM
from cortex.wire.fields.tables.table import FieldTable, content, honoured, in_envelope, limit, rejected
from cortex.wire.preset import PresetFields
from cortex.wire.request_summary import RequestSummary
from cortex.wire.requests import GenerateRequest, Prompt, Reasoning, Text
from cortex.wire.response import ResponseChoice, gather, total_usage
from cortex.wire.tenant import read_tenant

FIELDS = FieldTable(
    (
        in_envelope("model", "other"),
        content("prompt", "other", "a string, token ids, or a list of either"),
        honoured("echo", True),
        limit(
            "max_tokens",
            9,
            "of completions: absent, they end with the text or the context (16 tokens in OpenAI's API); "
            "0: no tokens, with `echo` the prompt alone; -1 is no limit, as in llama.cpp",
        ),
        limit("n_predict", 9, "llama.cpp's name for `max_tokens`; -1 is no limit, 0 computes the prompt alone"),
        in_envelope("n", 2),
        honoured("logprobs", 2, "with `echo` also of the prompt"),
        honoured("prompt_logprobs", 1, "vLLM; not in a stream"),
        honoured("return_token_ids", True, "vLLM: `token_ids` of choices, and `prompt_token_ids`"),
        honoured("response_format", {"type": "json_object"}),
        honoured("user", "u"),
        honoured("suffix", "x", "fills in before it; for models with the capability `insert`"),
        rejected("best_of", 3, "ranking of candidates is not supported; request several with 'n'", 1),
        rejected("add_special_tokens", False, "send the prompt as token ids to leave them out", True),
        rejected("prompt_embeds", "x", "a prompt is text or token ids"),
    ),
    STREAM,
    SAMPLING,
    OUTPUT,
    PROMPT,
    ACCOUNT,
    EXTENSIONS,
)


def read_summary(fields: Fields) -> RequestSummary:
    """Raises `MissingModel` or `InvalidValue`."""
    max_tokens, n = read_limits(fields, fewest_tokens=0)
    if (num_prompts := fields.num_prompts("prompt")) > MAX_PROMPTS:
        raise fields.invalid("prompt", f"a request may have at most {MAX_PROMPTS} prompts; send fewer")
    return RequestSummary(fields.model(), fields.flag("stream") or False, max_tokens, n * num_prompts)


def parse(body: bytes) -> GenerateRequest:
    """Raises `MalformedJSON`, `MissingModel` or `InvalidValue`."""
    fields = FIELDS.read(body)
    summary = read_summary(fields)
    top_logprobs = fields.integer("logprobs", low=0, high=MAX_TOP_LOGPROBS)
    echo = fields.flag("echo") or False
    prompt, *more_prompts = _read_prompts(fields)
    if summary.num_choices > MAX_CHOICES:
        raise fields.invalid(
            "prompt", f"{summary.num_choices} choices in one request, at most {MAX_CHOICES}; send fewer prompts"
        )
    suffix = fields.text("suffix") or None
    if suffix is not None and (more_prompts or not isinstance(prompt, str) or echo):
        raise fields.invalid("suffix", "it needs one prompt, as text, without 'echo'")
    stream_options = read_stream_options(fields)
    return GenerateRequest(
        model=summary.model,
        prompt=prompt,
        more_prompts=tuple(more_prompts),
        suffix=suffix,
        echo=echo,
        truncate_prompt_tokens=read_truncation(fields),
        output=read_output_format(fields, fields.object("response_format")),
        sampling=msgspec.structs.replace(
            read_sampling(fields),
            max_tokens=summary.completion_limit,
            n=summary.num_choices // (1 + len(more_prompts)),
            logprobs=top_logprobs is not None,
            top_logprobs=top_logprobs or 0,
            prompt_logprobs=read_prompt_logprobs(fields),
        ),
        stream=summary.stream,
        include_usage=(stream_options.flag("include_usage") or False) if stream_options else False,
        continuous_usage=(stream_options.flag("continuous_usage_stats") or False) if stream_options else False,
        return_token_ids=fields.flag("return_token_ids") or False,
        timings=fields.flag("timings_per_token") or False,
        user=fields.text("user"),
        ignored_fields=fields.unknown,
        tenant=read_tenant(fields),
        request_class=asked_class(fields, FIELDS.envelope),
    )


def _read_prompts(fields: Fields) -> list[Prompt]:
    """One prompt or more: a string, an array of token ids, or an array of either."""
    given = fields.raw("prompt")
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list) or not given:
        raise fields.invalid("prompt", "it is required: a string, an array of token ids, or an array of either")
    if all(isinstance(item, str) for item in given):
        return list(given)
    if all(isinstance(item, list) for item in given):
        return [_read_ids(fields, item) for item in given]
    return [_read_ids(fields, given)]


def _read_ids(fields: Fields, given: list[Any]) -> tuple[int, ...]:
    try:
        if given:
            return msgspec.convert(given, PromptIds)
    except msgspec.ValidationError:
        pass
    raise fields.invalid("prompt", "expected strings only, or arrays of token ids")


class Encoder(ChunkEncoder):
    """Events to chunks. One per response.

    Token offsets count characters from the start of the choice's text, which begins with the prompt if it is echoed.
    """

    def __init__(self, request: GenerateRequest, *, id: str, created: int, model: str) -> None:
        super().__init__("text_completion", request, id=id, created=created, model=model)
        self._offsets: dict[int, int] = {}
        self._counting: set[int] = set()
        """Choices whose first token was sent; from then on the tokens count the characters."""
        self._prompts: dict[int, tuple[int, ...]] = {}
        """Token ids that wait for the first chunk of their choice."""

    def encode(self, event: AnyEvent) -> bytes:
        match event:
            case TextDelta(text=text) | ReasoningDelta(text=text):
                index = event.index
                if index not in self._counting and index not in self._logprobs:
                    self._offsets[index] = self._offsets.get(index, 0) + len(text)
                return self._text_chunk(index, "text", text)
            case Logprobs() | UsageSoFar() | TokenIds():
                return self._note(event)
            case Start(prompt_token_ids=prompt):
                self._prompts[event.index] = prompt
                return b""
            case Finish():
                self._note(event)
                return self._finished(event, self._chunk([self._choice(event.index, "", _finish_body(event))]))
            case Failure(code=code, message=message):
                return stream_error(from_code(code, message))
            case _:
                return b""  # this dialect has neither roles nor tool calls

    def _whole_text_chunk(self, index: int, field: str, text: str) -> bytes:
        del field  # this dialect has one
        return self._chunk([self._choice(index, text, {"finish_reason": None})])

    def _choice(self, index: int, text: str, finish: dict[str, str | None]) -> dict[str, Any]:
        tokens = self._logprobs.pop(index, None)
        offset = self._offsets.get(index, 0)
        if tokens is not None:
            self._counting.add(index)
            self._offsets[index] = offset + sum(map(_num_characters, tokens))
        logprobs = None if tokens is None else _logprobs_body(tokens, offset)
        prompt = self._prompts.pop(index, ())
        ids = self._ids(index) | ({"prompt_token_ids": prompt} if prompt else {})
        return {"index": index, "text": text, "logprobs": logprobs, **finish, **ids}


def fold(events: Iterable[AnyEvent], request: GenerateRequest, *, id: str, created: int, model: str) -> bytes:
    """The whole response as one body. Raises the error of a `Failure`."""
    received = list(events)
    choices = gather(received)
    usage = total_usage(choice.finish for choice in choices)
    return msgspec.json.encode(
        {
            "id": id,
            "object": "text_completion",
            "created": created,
            "model": model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
            "choices": [_choice_body(choice, _num_echoed(received, choice.index), request) for choice in choices],
            "usage": usage_body(usage),
            **({"timings": timings_body(usage, choices[-1].finish.timing)} if request.timings else {}),
        }
    )


def _num_echoed(events: Sequence[AnyEvent], index: int) -> int:
    """Characters of a choice before its first token."""
    mine = (event for event in events if event.index == index)
    before = itertools.takewhile(lambda event: not isinstance(event, Logprobs), mine)
    return sum(len(event.text) for event in before if isinstance(event, TextDelta | ReasoningDelta))


def _choice_body(choice: ResponseChoice, echoed: int, request: GenerateRequest) -> dict[str, Any]:
    body: dict[str, Any] = {
        "index": choice.index,
        "text": "".join(block.text for block in choice.blocks if isinstance(block, Text | Reasoning)),
        "logprobs": _logprobs_body(choice.logprobs, echoed) if choice.logprobs or request.sampling.logprobs else None,
        **_finish_body(choice.finish),
    }
    if request.sampling.prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_logprobs_body(choice.prompt_logprobs)
    if request.return_token_ids:
        body |= {"token_ids": choice.token_ids, "prompt_token_ids": choice.prompt_token_ids}
    return body


def _finish_body(finish: Finish) -> dict[str, str | None]:
    body: dict[str, str | None] = {"finish_reason": finish.reason}
    if finish.stop_sequence is not None:
        body["stop_reason"] = finish.stop_sequence
    return body


def _logprobs_body(tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_top_body(token) for token in tokens],
        "text_offset": list(_offsets(tokens, offset)),
    }


def _offsets(tokens: Sequence[TokenLogprob], offset: int) -> Iterator[int]:
    for token in tokens:
        yield offset
        offset += _num_characters(token)


def _num_characters(token: TokenLogprob) -> int:
    return len(token.token) if token.bytes else 0


def _top_body(token: TokenLogprob) -> dict[str, float | None] | None:
    """The top tokens and the token itself, so one more than were asked for if it is none of them."""
    if token.logprob is None:
        return None
    return {**{other.token: other.logprob for other in token.top}, token.token: token.logprob}


DIALECT = Dialect(
    name="openai_completions",
    path="/v1/completions",
    fields=FIELDS,
    conversation=("prompt",),
    read_summary=read_summary,
    parse=parse,
    new_encoder=Encoder,
    fold=fold,
    stream_error=stream_error,
    id_prefix="cmpl-",
    spoken_by="servers",
    is_chat=False,
    preset=PresetFields(names={"max_completion_tokens": "max_tokens"}),
)
