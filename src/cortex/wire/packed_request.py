"""A parsed request on its way to another process, which reads the conversation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

import msgspec

from cortex.wire.errors import MAX_ECHO, InvalidValue
from cortex.wire.fields.constraints import unenforced_parts
from cortex.wire.fields.request_class import RequestClass
from cortex.wire.pictures.files import take_files
from cortex.wire.requests import GenerateRequest

MAX_HEAD_BYTES = 1 << 20
"""Decoding this many takes tens of milliseconds, which an event loop can afford."""
MAX_LOOP_TOKENS = 1 << 16
"""Token ids that an event loop handles; these take a few milliseconds."""
_PARTS: Final = {
    "model": "model",
    "more_prompts": "prompt",
    "tools": "tools",
    "tool_choice": "tool_choice",
    "output": "response_format",
    "sampling": "sampling",
    "template_args": "chat_template_kwargs",
    "user": "user",
    "metadata": "metadata",
}
"""The parts of a head that a client can make large: fields of GenerateRequest, and their names in errors."""

_decoder = msgspec.json.Decoder(GenerateRequest)


@dataclass(frozen=True, slots=True)
class PackedRequest:
    """The head of a request as a value, and all of it as bytes."""

    head: GenerateRequest
    """Without messages; prompts and suffix are empty."""
    rest: bytes
    """All of it without the files of pictures and without `token_prompts`."""
    files: tuple[bytes, ...] = ()
    """The files of its pictures, by their numbers."""
    token_prompts: tuple[tuple[int, ...], ...] = ()
    """Its prompts, if they are token ids that can be used as they are: no process need read the request then."""

    def served_in(self, name: RequestClass) -> PackedRequest:
        """The same with its class as the node has decided."""
        if name == (self.head.request_class or "default"):
            return self
        return replace(self, head=msgspec.structs.replace(self.head, request_class=name))

    def whole(self) -> bytes:
        """All of it without the files of pictures. With `token_prompts` it is decoded and encoded: call it once."""
        return encode(with_tokens(unpack(self.rest), self.token_prompts)) if self.token_prompts else self.rest


def pack(request: GenerateRequest) -> PackedRequest:
    """Raises InvalidValue for a picture that cannot be used."""
    request, files = take_files(request)
    rest, token_prompts = take_tokens(request)
    return PackedRequest(head_of(request), encode(rest), files, token_prompts)


def take_tokens(request: GenerateRequest) -> tuple[GenerateRequest, tuple[tuple[int, ...], ...]]:
    """`request` without its prompts, and the prompts, if they are `PackedRequest.token_prompts`."""
    prompts = tuple(each for each in (request.prompt, *request.more_prompts) if each and not isinstance(each, str))
    is_changed = request.truncate or request.truncate_prompt_tokens is not None or request.prediction
    is_whole = len(prompts) == 1 + len(request.more_prompts) and sum(map(len, prompts)) <= MAX_LOOP_TOKENS
    if not is_whole or is_changed:
        return request, ()
    return msgspec.structs.replace(request, prompt=(), more_prompts=()), prompts


def with_tokens(request: GenerateRequest, token_prompts: Sequence[tuple[int, ...]]) -> GenerateRequest:
    """What `take_tokens` was given; it reverses it."""
    prompt, *more = token_prompts
    return msgspec.structs.replace(request, prompt=prompt, more_prompts=tuple(more))


def encode(request: GenerateRequest) -> bytes:
    # JSON, because a schema may have integers of any size.
    return msgspec.json.encode(request)


def unpack(whole: bytes) -> GenerateRequest:
    """The request without the files of its pictures."""
    return _decoder.decode(whole)


def head_of(request: GenerateRequest) -> GenerateRequest:
    """`request` without messages; prompts are empty, and lists that are only reported are cut to what is shown."""
    return msgspec.structs.replace(
        request,
        messages=(),
        prompt=None if request.prompt is None else "",
        more_prompts=("",) * len(request.more_prompts),
        suffix=None if request.suffix is None else "",
        middle="",
        context_files=(),
        prediction=None,
        dropped_tools=_shown(request.dropped_tools),
        ignored_fields=_shown(request.ignored_fields),
        unenforced=_shown((*request.unenforced, *unenforced_parts(request))),
    )


def encode_head(request: GenerateRequest) -> bytes:
    """The head as JSON. Raises InvalidValue for a head of more than `MAX_HEAD_BYTES`: event loops read it."""
    parts = {name: len(msgspec.json.encode(getattr(request, field))) for field, name in _PARTS.items()}
    if sum(parts.values()) > MAX_HEAD_BYTES:
        largest = max(parts, key=parts.__getitem__)
        raise InvalidValue(
            f"everything except the messages takes {sum(parts.values())} bytes of JSON, at most {MAX_HEAD_BYTES} are "
            f"allowed; '{largest}' takes {parts[largest]} of them, make it smaller",
            param=largest,
        )
    return msgspec.json.encode(head_of(request))


def _shown(values: Iterable[str]) -> tuple[str, ...]:
    distinct = dict.fromkeys(value[:MAX_ECHO] for value in values)
    return tuple(islice(distinct, MAX_ECHO))
