"""The dialects by route and by name, for the gateway and the neuron."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from cortex.wire.dialects import (
    anthropic_messages,
    llama_cpp_infill,
    openai_chat,
    openai_completions,
    openai_responses,
)
from cortex.wire.dialects.ollama import chat as ollama_chat
from cortex.wire.dialects.ollama import generate as ollama_generate
from cortex.wire.dialects.openai_responses import compaction
from cortex.wire.errors import CortexError, Family
from cortex.wire.events import AnyEvent
from cortex.wire.fields.body import Fields
from cortex.wire.fields.tables.table import FieldTable
from cortex.wire.node.protocol import Dialect as DialectName
from cortex.wire.request_summary import RequestSummary
from cortex.wire.requests import GenerateRequest


class EventEncoder(Protocol):
    """Encodes one response as a stream: events in order to bytes, `b""` for an event that the dialect does not send."""

    def encode(self, event: AnyEvent, /) -> bytes: ...


class _MakeEncoder(Protocol):
    def __call__(self, request: GenerateRequest, *, id: str, created: int, model: str) -> EventEncoder: ...


class Dialect(Protocol):
    """The interface of each codec module."""

    @property
    def PATH(self) -> str:  # noqa: N802
        """Of `POST` requests that generate."""

    @property
    def CONVERSATION(self) -> tuple[str, ...]:  # noqa: N802
        """The fields that hold it, from its start."""

    @property
    def PICTURE_MARKS(self) -> tuple[bytes, ...]:  # noqa: N802
        """Every body with a picture contains one of these; empty if the dialect has no pictures. All begin with the
        same byte, for a fast search."""

    @property
    def CLIENT_FIELDS(self) -> Mapping[str, str]:  # noqa: N802
        """Client names of `GenerateRequest` fields that are named differently."""

    @property
    def FAMILY(self) -> Family: ...  # noqa: N802

    @property
    def FIELDS(self) -> FieldTable: ...  # noqa: N802

    @property
    def ID_PREFIX(self) -> str: ...  # noqa: N802

    @property
    def CONTENT_TYPE(self) -> str: ...  # noqa: N802

    @property
    def KEEPALIVE(self) -> bytes: ...  # noqa: N802

    @property
    def Encoder(self) -> _MakeEncoder: ...  # noqa: N802

    def read_facts(self, fields: Fields) -> RequestSummary: ...

    def pictures(self, fields: Fields) -> Iterable[str]: ...

    def parse(self, body: bytes) -> GenerateRequest: ...

    def fold(
        self, events: Iterable[AnyEvent], request: GenerateRequest, *, id: str, created: int, model: str
    ) -> bytes: ...

    def stream_error(self, error: CortexError) -> bytes: ...


DIALECTS: Mapping[DialectName, Dialect] = {
    "openai_chat": openai_chat,
    "openai_completions": openai_completions,
    "openai_responses": openai_responses,
    "anthropic_messages": anthropic_messages,
    "ollama_chat": ollama_chat,
    "ollama_generate": ollama_generate,
    "llama_cpp_infill": llama_cpp_infill,
    "openai_compaction": compaction,
}

ROUTES: Mapping[str, DialectName] = {codec.PATH: name for name, codec in DIALECTS.items()}
"""`POST` paths that generate, and the dialect of each."""

_OF_FUNCTIONS = {"tools": "functions", "tool_choice": "function_call"}


def client_field(dialect: DialectName, name: str | None, *, as_functions: bool = False) -> str | None:
    """The client's name of the `GenerateRequest` field `name`. `as_functions`: as in the request."""
    names = _OF_FUNCTIONS if as_functions else DIALECTS[dialect].CLIENT_FIELDS
    return names.get(name, name) if name is not None else None


def family(path: str, *, is_anthropic: bool = False) -> Family:
    """The error format that clients of `path` expect. Both vendors' clients list models, and use files and other paths
    that do not exist here: there `is_anthropic` decides, which says that the request has Anthropic's version header."""
    if path.startswith("/v1/messages") or (is_anthropic and path.startswith("/v1/") and path not in ROUTES):
        return Family.ANTHROPIC
    return Family.OLLAMA if path.startswith("/api/") else Family.OPENAI
