"""Request fields that an alias or a Modelfile adds to a request, in any dialect."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec
from msgspec import Raw

from cortex.wire.dialects.ollama.fields import OPTIONS
from cortex.wire.node.protocol import Dialect

ROUTED_FIELDS: Final = frozenset({"model", "stream", "stream_options", "n", "best_of"})
"""Fields that the gateway itself reads to relay a response and to count it."""
Reasoning = Literal["none", "minimal", "low", "medium", "high", "xhigh"]

_OLLAMA: Final = ("ollama_chat", "ollama_generate")
_OLLAMA_NAMES: Final = {
    "max_tokens": "num_predict",
    "max_completion_tokens": "num_predict",
    "repetition_penalty": "repeat_penalty",
    "repetition_window": "repeat_last_n",
}
_NAMES: Final[dict[str, dict[str, str]]] = {
    "anthropic_messages": {"stop": "stop_sequences", "max_completion_tokens": "max_tokens"},
    "openai_responses": {"max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens"},
    "openai_completions": {"max_completion_tokens": "max_tokens"},
}
"""Names of chat completions fields in other dialects, if different."""
_SYNONYMS: Final = (
    frozenset({"max_tokens", "max_completion_tokens"}),
    frozenset({"repetition_penalty", "repeat_penalty"}),
    frozenset({"repetition_window", "repeat_last_n"}),
)
_THINK: Final = {"none": False, "minimal": "low", "xhigh": "max"}
_object = msgspec.json.Decoder(dict[str, Raw])


class _Message(msgspec.Struct):
    role: str = ""


_messages = msgspec.json.Decoder(list[_Message])


class Preset(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Field names are those of chat completions; other dialects get them under their own names."""

    set_params: dict[str, Any] = msgspec.field(default_factory=dict)
    """Fields set in every request, overriding those of the client: `{ temperature = 0.2, chat_template_kwargs = { … }
    }`. Names are those of chat completions; requests of other dialects get them under their own names."""
    default_params: dict[str, Any] = msgspec.field(default_factory=dict)
    """The same, only for requests without the field."""
    system: str | None = None
    """The system prompt for requests without one."""
    messages: tuple[dict[str, str], ...] = ()
    """Turns before those of a request, each with `role` and `content`; for chats only."""
    reasoning: Reasoning | None = None
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

    def applied(self, body: bytes, dialect: Dialect, *, is_opaque: bool = False) -> bytes:
        """`body`, a JSON object, with these fields. `is_opaque`: a server alone knows its fields, so it gets only
        those that are set. Raises msgspec.DecodeError."""
        fields = _object.decode(body)
        self._write_params(fields, dialect)
        if not is_opaque:
            if self.reasoning is not None:
                _write_reasoning(fields, dialect, self.reasoning)
            self._write_conversation(fields, dialect)
        return msgspec.json.encode(fields)

    def _write_params(self, fields: dict[str, Raw], dialect: Dialect) -> None:
        if dialect in _OLLAMA:
            options = _object.decode(fields["options"]) if _is_object(fields, "options") else {}
            self._write(options, fields, dialect)
            if options:
                fields["options"] = Raw(msgspec.json.encode(options))
        else:
            self._write(fields, fields, dialect)

    def _write(self, options: dict[str, Raw], fields: dict[str, Raw], dialect: Dialect) -> None:
        for values, replaces in ((self.default_params, False), (self.set_params, True)):
            for name, value in values.items():
                own = (_OLLAMA_NAMES if dialect in _OLLAMA else _NAMES.get(dialect, {})).get(name, name)
                place = options if dialect in _OLLAMA and own in OPTIONS else fields
                synonyms = next((group for group in _SYNONYMS if own in group), frozenset({own}))
                given = [each for each in synonyms if _is_given(place, each)]
                if given and not replaces:
                    continue
                for each in given:
                    del place[each]
                place[own] = Raw(msgspec.json.encode(value))

    def _write_conversation(self, fields: dict[str, Raw], dialect: Dialect) -> None:
        if dialect in ("anthropic_messages", "ollama_generate"):
            self._write_system(fields, "system")
        elif dialect == "openai_responses":
            self._write_system(fields, "instructions")
        if "messages" not in fields or dialect == "ollama_generate":
            return
        try:
            roles = [message.role for message in _messages.decode(fields["messages"])]
        except msgspec.DecodeError:
            return  # its parser has the error
        if not roles:
            return  # it only loads the model
        leading: list[dict[str, str]] = []
        has_system = any(role in ("system", "developer") for role in roles)
        if self.system and not has_system and dialect != "anthropic_messages":
            leading.append({"role": "system", "content": self.system})
        own = [each for each in self.messages if each["role"] != "system" or dialect != "anthropic_messages"]
        if leading or own:
            joined = msgspec.json.encode([*leading, *own])[:-1] + b"," + bytes(fields["messages"]).strip()[1:]
            fields["messages"] = Raw(joined)

    def _write_system(self, fields: dict[str, Raw], name: str) -> None:
        if self.system and not _is_given(fields, name):
            fields[name] = Raw(msgspec.json.encode(self.system))


def _write_reasoning(fields: dict[str, Raw], dialect: Dialect, effort: Reasoning) -> None:
    def write(name: str, value: Any) -> None:
        fields[name] = Raw(msgspec.json.encode(value))

    if dialect in _OLLAMA:
        write("think", _THINK.get(effort, effort))
    elif dialect == "anthropic_messages":
        write("thinking", {"type": "disabled"} if effort == "none" else {"type": "adaptive"})
        if effort != "none":
            effort = "low" if effort == "minimal" else effort
            given = msgspec.json.decode(fields["output_config"]) if _is_object(fields, "output_config") else {}
            write("output_config", {**given, "effort": effort})
    elif dialect == "openai_responses":
        given = msgspec.json.decode(fields["reasoning"]) if _is_object(fields, "reasoning") else {}
        write("reasoning", {**given, "effort": effort})
    elif dialect == "openai_chat":
        for other in ("enable_thinking", "thinking_budget_tokens"):
            fields.pop(other, None)
        write("reasoning_effort", effort)


def _is_given(fields: dict[str, Raw], name: str) -> bool:
    return name in fields and bytes(fields[name]).strip() not in (b"null", b"")


def _is_object(fields: dict[str, Raw], name: str) -> bool:
    return name in fields and bytes(fields[name]).lstrip().startswith(b"{")
