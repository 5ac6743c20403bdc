"""The envelope of a request body: the few fields that a gateway reads.

Only the fields that routing and metering need are decoded; the rest stays bytes. Each dialect has its own fields, with
the limits that the node's parser of that dialect honours, so that no field of another dialect is taken for one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from cortex.parsing.picture_scan import find_pictures
from cortex.wire.dialects.ollama.request import duration_s
from cortex.wire.errors import CortexError, InvalidValue, MalformedJSON, MissingModel, shorten
from cortex.wire.fields.body import MAX_MODEL_NAME
from cortex.wire.fields.sampling import DEFAULT_COMPLETION_TOKENS, MAX_CHOICES
from cortex.wire.node.protocol import Dialect

MAX_COMPLETION_TOKENS = 2**31 - 1
MAX_PROMPTS = 1024
"""Prompts in one completions request; foreign servers accept lists of them."""

ABSENT = Raw()
_EMPTY = re.compile(rb'\s*(?:null|""|\[\s*\])?\s*')
_LIST_OF_PROMPTS = re.compile(rb'\[\s*["\[]')

_MODEL = re.compile(rb'"(?:m|\\u006[dD])(?:o|\\u006[fF])(?:d|\\u0064)(?:e|\\u0065)(?:l|\\u006[cC])"')
_ESCAPED_LETTER = b"\\u006"
_MODEL_NAME = b'"model"'
_members_decoder = msgspec.json.Decoder(dict[str, Raw])

CompletionLimit = Annotated[int, Meta(ge=1, le=MAX_COMPLETION_TOKENS)]
OpenLimit = Annotated[int, Meta(ge=-1, le=MAX_COMPLETION_TOKENS)]
"""-1 is no limit, as in llama.cpp."""
ChoiceCount = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]


class Facts(msgspec.Struct, frozen=True, array_like=True):
    """What an envelope says, without the conversation."""

    model: str
    stream: bool
    completion_limit: int | None
    """The client's limit on generated tokens for one choice; None when it sets none."""
    num_choices: int
    """How many completions are generated for the request."""
    store: bool | None = None
    """This and what follows are fields of the Responses API."""
    previous_response_id: str | None = None
    background: bool = False
    loads_only: bool = False
    """This and what follows are of Ollama's API: whether the request has no prompt and asks for the model only."""
    unloads: bool = False
    """Whether the model is to be unloaded after the response."""
    has_pictures: bool = False
    picture_bytes: int = 0
    """How much of the body is pictures, which count as tokens instead."""
    picture_tokens: int = 0
    conversation_id: str | None = None
    """The conversation that the request continues (Responses API)."""
    cache_salt: bytes = b""
    """The client's salt for cached prefixes, as JSON; empty: none."""


class Envelope(msgspec.Struct, frozen=True):
    """What a gateway reads of a body."""

    facts: Facts
    conversation: Sequence[Raw]
    """The values that hold it, from its start; `input` is the last."""

    @property
    def input(self) -> Raw:
        return self.conversation[-1]

    def prompt_bytes(self, max_bytes: int) -> bytes:
        """The conversation from its start: a later turn begins with the same bytes, up to the end of the array."""
        parts, remaining = [], max_bytes
        for field in self.conversation:
            part = memoryview(field)[:remaining]
            parts.append(part)
            remaining -= len(part)
        return b"".join(parts)


class _Fields(msgspec.Struct, frozen=True):
    """The fields that every dialect shares. The base class reads requests that generate nothing."""

    model: str | None = None
    stream: bool | None = None
    system: Raw = ABSENT
    instructions: Raw = ABSENT
    messages: Raw = ABSENT
    prompt: Raw = ABSENT
    input: Raw = ABSENT
    cache_salt: Raw = ABSENT

    @property
    def completion_limit(self) -> int | None:
        return 0

    def num_choices(self) -> int:
        return 1

    def facts(self, model: str) -> Facts:
        return Facts(model, bool(self.stream), self.completion_limit, self.num_choices())


class _MessagesFields(_Fields, frozen=True):
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_COMPLETION_TOKENS)] | None = None
    """0 asks for no tokens, and reserves as no limit does."""

    @property
    def completion_limit(self) -> int | None:
        return self.max_tokens or None


class _ConversationParam(msgspec.Struct, frozen=True):
    id: str


class _StateFields(_Fields, frozen=True):
    """A request of the Responses API. This class reads those that generate nothing."""

    store: bool | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    conversation: str | _ConversationParam | None = None

    def facts(self, model: str) -> Facts:
        """Raises InvalidValue."""
        conversation = self.conversation
        if conversation is not None and self.previous_response_id is not None:
            raise InvalidValue("conversation: use either it or 'previous_response_id', not both.", param="conversation")
        return Facts(
            model,
            bool(self.stream),
            self.completion_limit,
            self.num_choices(),
            self.store,
            self.previous_response_id,
            bool(self.background),
            conversation_id=conversation.id if isinstance(conversation, _ConversationParam) else conversation,
        )


class _ResponsesFields(_StateFields, frozen=True):
    max_output_tokens: CompletionLimit | None = None

    @property
    def completion_limit(self) -> int | None:
        return self.max_output_tokens


class _CompletionsFields(_Fields, frozen=True):
    max_tokens: OpenLimit | None = None
    """0 asks for no tokens. Some foreign servers read it as no limit, so it reserves as none."""
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_COMPLETION_TOKENS)] | None = None
    n: ChoiceCount | None = None
    best_of: ChoiceCount | None = None

    @property
    def completion_limit(self) -> int | None:
        if self.max_tokens and self.max_tokens > 0:
            return self.max_tokens
        return max(self.min_tokens, DEFAULT_COMPLETION_TOKENS) if self.min_tokens else None

    def num_choices(self) -> int:
        """`best_of` candidates are generated even where only `n` of them are returned. Raises InvalidValue."""
        num_prompts = _num_prompts(self.prompt)
        if num_prompts > MAX_PROMPTS:
            raise InvalidValue(f"prompt: more than {MAX_PROMPTS} prompts in one request; send fewer.", param="prompt")
        return max(self.n or 1, self.best_of or 1) * num_prompts


class _ChatFields(_CompletionsFields, frozen=True):
    max_completion_tokens: CompletionLimit | None = None

    @property
    def completion_limit(self) -> int | None:
        """The larger of the two fields: a node prefers the newer one, a foreign server may know only the older one."""
        newer, older = self.max_completion_tokens, self.max_tokens
        if newer is None or older == -1:  # which a foreign server may prefer
            return super().completion_limit
        return newer if older is None or newer > older else older

    def num_choices(self) -> int:
        return 1 if self.n is None and self.best_of is None else max(self.n or 1, self.best_of or 1)

    def facts(self, model: str) -> Facts:
        """Raises InvalidValue."""
        if self.max_tokens == 0:
            raise InvalidValue("max_tokens: a response has at least one token; -1 is no limit.", param="max_tokens")
        return super().facts(model)


class _InfillFields(_Fields, frozen=True):
    n_predict: int | None = None
    input_prefix: Raw = ABSENT
    input_suffix: Raw = ABSENT

    @property
    def completion_limit(self) -> int | None:
        limit = self.n_predict
        return min(limit, MAX_COMPLETION_TOKENS) if limit is not None and limit >= 1 else None


class _OllamaOptions(msgspec.Struct, frozen=True):
    num_predict: float | None = None


class _OllamaFields(_Fields, frozen=True):
    options: _OllamaOptions | None = None
    keep_alive: float | str | None = None
    images: Raw = ABSENT
    suffix: Raw = ABSENT

    @property
    def completion_limit(self) -> int | None:
        limit = self.options.num_predict if self.options is not None else None
        return min(int(limit), MAX_COMPLETION_TOKENS) if limit is not None and limit >= 1 else None

    def facts(self, model: str) -> Facts:
        has_prompt = any(map(_has_content, (self.messages, self.prompt, self.images, self.suffix)))
        keep_alive = duration_s(self.keep_alive) if isinstance(self.keep_alive, str) else self.keep_alive
        stream = self.stream is not False
        return Facts(model, stream, self.completion_limit, 1, loads_only=not has_prompt, unloads=keep_alive == 0)


def _has_content(value: Raw) -> bool:
    return not _EMPTY.fullmatch(memoryview(value))


@cache
def _prompts_decoder() -> msgspec.json.Decoder[Any]:
    """Reads the first items of an array. Unlike a list, it takes no memory for further items. Made when it is needed
    first, because it takes half a megabyte."""
    fields = [(f"prompt_{index}", Raw, ABSENT) for index in range(MAX_PROMPTS + 1)]
    return msgspec.json.Decoder(msgspec.defstruct("_Prompts", fields, array_like=True))


_plain_decoder = msgspec.json.Decoder(_Fields)
_count_decoders: dict[Dialect, msgspec.json.Decoder[_Fields]] = {
    "openai_responses": msgspec.json.Decoder[_Fields](_StateFields)
}
_decoders: dict[Dialect, msgspec.json.Decoder[_Fields]] = {
    "openai_chat": msgspec.json.Decoder[_Fields](_ChatFields),
    "openai_completions": msgspec.json.Decoder[_Fields](_CompletionsFields),
    "openai_responses": msgspec.json.Decoder[_Fields](_ResponsesFields),
    "anthropic_messages": msgspec.json.Decoder[_Fields](_MessagesFields),
    "ollama_chat": msgspec.json.Decoder[_Fields](_OllamaFields),
    "ollama_generate": msgspec.json.Decoder[_Fields](_OllamaFields),
    "llama_cpp_infill": msgspec.json.Decoder[_Fields](_InfillFields),
    "openai_compaction": msgspec.json.Decoder[_Fields](_ResponsesFields),
}


def read(body: bytes, dialect: Dialect, generates: bool = True) -> Envelope:
    """The envelope of `body` as `dialect` defines it. Raises MalformedJSON, InvalidValue or MissingModel."""
    decoder = _decoders[dialect] if generates else _count_decoders.get(dialect, _plain_decoder)
    try:
        fields = decoder.decode(body)
    except msgspec.ValidationError as problem:
        raise _invalid(str(problem)) from problem
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise MalformedJSON(f"The body is not valid JSON: {shorten(str(problem))}") from problem
    if (body.count(_MODEL_NAME) > 1 or body.find(_ESCAPED_LETTER) >= 0) and _has_duplicates(body):
        raise InvalidValue("model: the body has it more than once; send it once.", param="model")
    if not fields.model:
        raise MissingModel('The body names no model; add "model" with a name from GET /v1/models.', param="model")
    if len(fields.model) > MAX_MODEL_NAME:
        raise InvalidValue(
            f"model: the name has {len(fields.model)} characters, at most {MAX_MODEL_NAME} are allowed.",
            param="model",
        )
    facts = fields.facts(fields.model)
    if fields.cache_salt is not ABSENT and _has_content(fields.cache_salt):
        facts = msgspec.structs.replace(facts, cache_salt=bytes(fields.cache_salt))
    if dialect == "llama_cpp_infill" and isinstance(fields, _InfillFields):
        return Envelope(facts, (fields.input_prefix, fields.prompt, fields.input_suffix))
    conversation = (fields.system, fields.instructions, fields.messages, fields.prompt, fields.input)
    pictures = find_pictures(body, dialect)
    if pictures.num_bytes:
        num_bytes, num_tokens = pictures
        facts = msgspec.structs.replace(facts, has_pictures=True, picture_bytes=num_bytes, picture_tokens=num_tokens)
    return Envelope(facts, conversation)


def _has_duplicates(body: bytes) -> bool:
    """Whether the object has `model` twice: what checks it might read one of them, and what runs it the other. The
    texts that are in values are subtracted."""
    inside = sum(_num_names(bytes(value)) for value in _members_decoder.decode(body).values())
    return _num_names(body) - inside > 1


def _num_names(text: bytes) -> int:
    return sum(1 for _ in _MODEL.finditer(text)) if _ESCAPED_LETTER in text else text.count(_MODEL_NAME)


def _num_prompts(prompt: Raw) -> int:
    """How many prompts `prompt` contains: one, unless it is an array of texts or of arrays of token ids."""
    if not _LIST_OF_PROMPTS.match(memoryview(prompt)):
        return 1
    return sum(item is not ABSENT for item in msgspec.structs.astuple(_prompts_decoder().decode(prompt)))


def _invalid(problem: str) -> CortexError:
    reason, at, path = problem.partition(" - at `$")
    if not at:
        return MalformedJSON(f"The body must be a JSON object: {reason}.")
    param = path.rstrip("`").lstrip(".")
    return InvalidValue(f"{param}: {reason}.", param=param)
