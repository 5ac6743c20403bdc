"""Request fields that an alias or a Modelfile adds to a request, in any dialect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec
from msgspec import Raw

JsonFields = dict[str, Raw]
"""The fields of an object, whose values are not decoded."""
ROUTED_FIELDS: Final = frozenset({"model", "stream", "stream_options", "n", "best_of"})
"""Fields that the gateway itself reads to relay a response and to count it."""
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]

_SYNONYMS: Final = (
    frozenset({"max_tokens", "max_completion_tokens"}),
    frozenset({"repetition_penalty", "repeat_penalty"}),
    frozenset({"repetition_window", "repeat_last_n"}),
)
_object = msgspec.json.Decoder(JsonFields)


class _Message(msgspec.Struct):
    role: str = ""


_messages = msgspec.json.Decoder(list[_Message])


def _ignore(fields: JsonFields, effort: ReasoningEffort) -> None:
    """Requests of the dialect have no reasoning effort."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetFields:
    """The places of a preset's fields in a dialect."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Names of chat completions fields, if different."""
    options: frozenset[str] = frozenset()
    """The fields that are in the object `options` of the body."""
    system: str = ""
    """The field with the system prompt. Empty: it is the first of `messages`."""
    has_messages: bool = False
    write_reasoning: Callable[[JsonFields, ReasoningEffort], None] = _ignore


class Preset(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Field names are those of chat completions; other dialects get them under their own names."""

    set_params: dict[str, Any] = msgspec.field(default_factory=dict)
    """Fields set in every request, overriding those of the client: `{ temperature = 0.2, chat_template_kwargs = { … }
    }`. Names are those of chat completions; requests of other dialects get them under their own names. A value that
    the API of a dialect does not know, such as a temperature above 1 in Anthropic's messages, is rejected there."""
    default_params: dict[str, Any] = msgspec.field(default_factory=dict)
    """The same, only for requests without the field."""
    system: str | None = None
    """The system prompt for requests without one."""
    messages: tuple[dict[str, str], ...] = ()
    """Turns before those of a request, each with `role` and `content`; for chats only."""
    reasoning: ReasoningEffort | None = None
    """The reasoning effort, overriding the client's."""

    def __post_init__(self) -> None:
        if fixed := sorted(ROUTED_FIELDS & {*self.set_params, *self.default_params}):
            raise ValueError(f"set_params and default_params cannot have {', '.join(fixed)}; remove them")
        for message in self.messages:
            if set(message) != {"role", "content"} or message["role"] not in ("system", "user", "assistant"):
                raise ValueError("each of `messages` has a `role` (system, user or assistant) and a `content`")

    @property
    def adds_fields(self) -> bool:
        return bool(self.set_params or self.default_params or self.system or self.messages or self.reasoning)

    def over(self, other: Preset) -> Preset:
        """These fields, and those of `other` where there are none."""
        return Preset(
            set_params={**other.set_params, **self.set_params},
            default_params={**other.default_params, **self.default_params},
            system=self.system or other.system,
            messages=self.messages or other.messages,
            reasoning=self.reasoning or other.reasoning,
        )

    def applied(self, body: bytes, dialect: PresetFields, *, is_opaque: bool = False) -> bytes:
        """`body`, a JSON object, with these fields. `is_opaque`: a server alone knows its fields, so it gets only
        those that are set. Raises msgspec.DecodeError."""
        fields = _object.decode(body)
        self._write_params(fields, dialect)
        if not is_opaque:
            if self.reasoning is not None:
                dialect.write_reasoning(fields, self.reasoning)
            self._write_conversation(fields, dialect)
        return msgspec.json.encode(fields)

    def _write_params(self, fields: JsonFields, dialect: PresetFields) -> None:
        options = object_in(fields, "options") if dialect.options else {}
        for values, replaces in ((self.default_params, False), (self.set_params, True)):
            for name, value in values.items():
                own = dialect.names.get(name, name)
                place = options if own in dialect.options else fields
                synonyms = next((group for group in _SYNONYMS if own in group), frozenset({own}))
                given = [each for each in synonyms if _is_given(place, each)]
                if given and not replaces:
                    continue
                for each in given:
                    del place[each]
                write(place, own, value)
        if options:
            write(fields, "options", options)

    def _write_conversation(self, fields: JsonFields, dialect: PresetFields) -> None:
        if self.system and dialect.system and not _is_given(fields, dialect.system):
            write(fields, dialect.system, self.system)
        if not dialect.has_messages or "messages" not in fields:
            return
        try:
            roles = [message.role for message in _messages.decode(fields["messages"])]
        except msgspec.DecodeError:
            return  # its parser has the error
        if not roles:
            return  # it only loads the model
        leading: list[dict[str, str]] = []
        has_system = any(role in ("system", "developer") for role in roles)
        if self.system and not has_system and not dialect.system:
            leading.append({"role": "system", "content": self.system})
        own = [each for each in self.messages if each["role"] != "system" or not dialect.system]
        if leading or own:
            joined = msgspec.json.encode([*leading, *own])[:-1] + b"," + bytes(fields["messages"]).strip()[1:]
            fields["messages"] = Raw(joined)


def write(fields: JsonFields, name: str, value: Any) -> None:
    fields[name] = Raw(msgspec.json.encode(value))


def object_in(fields: JsonFields, name: str) -> JsonFields:
    """The fields of the object `name`; empty where there is none."""
    is_object = name in fields and bytes(fields[name]).lstrip().startswith(b"{")
    return _object.decode(fields[name]) if is_object else {}


def _is_given(fields: JsonFields, name: str) -> bool:
    return name in fields and bytes(fields[name]).strip() not in (b"null", b"")
