"""What the folder of a dialect gives to the programs: one `Dialect`. Nothing else knows a dialect's fields."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from cortex.wire import sse
from cortex.wire.error_encoding import OPENAI, Family
from cortex.wire.errors import CortexError
from cortex.wire.events import AnyEvent
from cortex.wire.fields.body import Fields
from cortex.wire.fields.tables.table import FieldTable
from cortex.wire.preset import PresetFields
from cortex.wire.request_summary import RequestSummary, model_only
from cortex.wire.requests import GenerateRequest

SpokenBy = Literal["cortex", "harnesses", "servers"]
"""Our programs only; also the servers that nodes start; also servers of others."""


class EventEncoder(Protocol):
    """Encodes one response as a stream: events in order to bytes, `b""` for an event that the dialect does not send."""

    def encode(self, event: AnyEvent, /) -> bytes: ...


class MakeEncoder(Protocol):
    def __call__(self, request: GenerateRequest, *, id: str, created: int, model: str) -> EventEncoder: ...


class Fold(Protocol):
    def __call__(
        self, events: Iterable[AnyEvent], request: GenerateRequest, *, id: str, created: int, model: str
    ) -> bytes:
        """The whole response as one body. Raises the error of a `Failure`."""


def _no_pictures(fields: Fields) -> tuple[str, ...]:  # noqa: ARG001
    return ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dialect:
    name: str
    """In reports of nodes, in metrics and between the processes of a program."""
    path: str
    """Of `POST` requests that generate."""
    fields: FieldTable
    conversation: tuple[str, ...]
    """The fields that hold it, from its start."""
    read_summary: Callable[[Fields], RequestSummary]
    """What a gateway must know. The parser calls it, too. Raises MissingModel or InvalidValue."""
    parse: Callable[[bytes], GenerateRequest]
    """Raises MalformedJSON, MissingModel, InvalidValue or UnsupportedModality."""
    new_encoder: MakeEncoder
    fold: Fold
    stream_error: Callable[[CortexError], bytes]
    """The end of a stream that failed."""
    id_prefix: str
    """Of the ids of responses."""
    family: Family = OPENAI
    spoken_by: SpokenBy = "cortex"
    is_chat: bool = True
    """Whether requests are conversations; others continue or fill in a text."""
    content_type: str = sse.CONTENT_TYPE
    """Of a stream."""
    keepalive: bytes = sse.COMMENT
    client_fields: Mapping[str, str] = field(default_factory=dict)
    """What clients call fields of a `GenerateRequest` that have another name there."""
    preset: PresetFields = field(default_factory=PresetFields)
    """Where a request has what an alias or a Modelfile adds to it."""
    picture_marks: tuple[bytes, ...] = ()
    """One of these is in every body with a picture; empty: the dialect has none. They begin with the same byte, which
    is found fastest."""
    pictures: Callable[[Fields], Iterable[str]] = _no_pictures
    """All pictures that `parse` finds, in base64 or as URLs, unchecked. Raises InvalidValue."""
    read_counted_summary: Callable[[Fields], RequestSummary] = model_only
    """As `read_summary`, for a request that generates nothing: the tokens of its prompt are counted."""
    parse_counted: Callable[[bytes], GenerateRequest] | None = None
    """As `parse`, for such a request; None: as other requests."""
    loading_chunk: Callable[[str, str, float], bytes] | None = None
    """A chunk with reasoning before the first of the response, from the model's name, a text and the time. None: a
    stream cannot begin with one."""

    @property
    def is_passed_on(self) -> bool:
        """Whether the server of a harness gets requests as they are. It gets all others as chat."""
        return not self.is_chat and self.spoken_by != "cortex"

    @property
    def operation(self) -> str:
        """OpenTelemetry's name for its requests."""
        return "chat" if self.is_chat else "text_completion"
