"""llama.cpp's `/infill`, with which editors complete code at the cursor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from cortex.wire.dialects.dialect import Dialect
from cortex.wire.dialects.openai_chunks import stream_error, timings_body
from cortex.wire.error_encoding import from_code
from cortex.wire.events import AnyEvent, Failure, Finish, ReasoningDelta, TextDelta
from cortex.wire.fields.body import LARGEST_COUNT, Fields
from cortex.wire.fields.sampling import LOCAL, read_sampling
from cortex.wire.fields.tables.shared import CACHE_SALT, SAMPLING
from cortex.wire.fields.tables.table import FieldTable, content, in_envelope, limit, tolerated
from cortex.wire.request_summary import RequestSummary
from cortex.wire.requests import GenerateRequest, Reasoning, Text
from cortex.wire.response import gather
from cortex.wire.sse import frame
from cortex.wire.tenant import read_tenant

FIELDS = FieldTable(
    (
        in_envelope("model", "other"),
        content("input_prefix", "def f(", "the text before the gap"),
        content("input_suffix", "return x", "the text behind it"),
        content("prompt", "other", "the beginning of what is filled in"),
        content(
            "input_extra",
            [{"filename": "a.py", "text": "x = 1"}],
            "other files, before all else; with the tokens for repositories, if the model has them",
        ),
        limit("n_predict", 9, "-1 is no limit, 0 computes the prompt alone"),
        in_envelope("stream", True),
        CACHE_SALT,
        tolerated("cache_prompt", True, "prefixes are always cached"),
        tolerated("id_slot", -1),
        tolerated("n_indent", 0),
        tolerated("t_max_prompt_ms", 500, "a hint for speed"),
        tolerated("t_max_predict_ms", 500, "a hint for speed"),
        tolerated("response_fields", ["content"]),
    ),
    SAMPLING,
)


def read_summary(fields: Fields) -> RequestSummary:
    """Raises `MissingModel` or `InvalidValue`."""
    limit = fields.integer("n_predict", low=-LARGEST_COUNT, high=LARGEST_COUNT)
    return RequestSummary(
        fields.model(), fields.flag("stream") or False, limit if limit is not None and limit >= 0 else None, 1
    )


def parse(body: bytes) -> GenerateRequest:
    """Raises `MalformedJSON`, `MissingModel` or `InvalidValue`."""
    fields = FIELDS.read(body)
    summary = read_summary(fields)
    files = [(each.text("filename") or "", each.required_text("text")) for each in fields.objects("input_extra")]
    return GenerateRequest(
        model=summary.model,
        prompt=fields.text("input_prefix") or "",
        suffix=fields.text("input_suffix") or "",
        middle=fields.text("prompt") or "",
        context_files=tuple(files),
        sampling=msgspec.structs.replace(read_sampling(fields, LOCAL), max_tokens=summary.completion_limit),
        stream=summary.stream,
        include_usage=True,
        ignored_fields=fields.unknown,
        tenant=read_tenant(fields),
    )


class Encoder:
    """Events to chunks. One per response."""

    def __init__(self, request: GenerateRequest, *, id: str, created: int, model: str) -> None:
        del request, id, created
        self._model = model

    def encode(self, event: AnyEvent) -> bytes:
        match event:
            case TextDelta(text=text) | ReasoningDelta(text=text):
                chunk = {"index": 0, "content": text, "tokens": [], "stop": False, "model": self._model}
                return frame(msgspec.json.encode(chunk))
            case Finish():
                return frame(msgspec.json.encode(_end("", event, self._model)))
            case Failure(code=code, message=message):
                return stream_error(from_code(code, message))
            case _:
                return b""


def fold(events: Iterable[AnyEvent], request: GenerateRequest, *, id: str, created: int, model: str) -> bytes:
    """The whole response as one body. Raises the error of a `Failure`."""
    del request, id, created
    choice = gather(events)[0]
    text = "".join(block.text for block in choice.blocks if isinstance(block, Text | Reasoning))
    return msgspec.json.encode(_end(text, choice.finish, model))


def _end(text: str, finish: Finish, model: str) -> dict[str, Any]:
    usage = finish.usage
    return {
        "index": 0,
        "content": text,
        "tokens": [],
        "stop": True,
        "stop_type": "limit" if finish.reason == "length" else "word" if finish.stop_sequence else "eos",
        "stopping_word": finish.stop_sequence or "",
        "model": model,
        "tokens_predicted": usage.completion_tokens,
        "tokens_evaluated": usage.prompt_tokens,
        "tokens_cached": usage.cached_tokens,
        "truncated": False,
        "timings": timings_body(usage, finish.timing),
    }


DIALECT = Dialect(
    name="llama_cpp_infill",
    path="/infill",
    fields=FIELDS,
    conversation=("input_prefix", "prompt", "input_suffix"),
    read_summary=read_summary,
    parse=parse,
    new_encoder=Encoder,
    fold=fold,
    stream_error=stream_error,
    id_prefix="infill-",
    spoken_by="harnesses",
    is_chat=False,
    client_fields={"prompt": "input_prefix", "suffix": "input_suffix"},
)
