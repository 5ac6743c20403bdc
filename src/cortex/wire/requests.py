"""The internal request. Every dialect parses into it, and nodes read nothing else.

A field that the client left out stays `None`. The node fills it from the model's `generation_config.json`, then from
our defaults.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Prompt = str | tuple[int, ...]
"""Text or token ids."""
Role = Literal["system", "developer", "user", "assistant", "tool"]


class Value(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of the immutable values on the wire."""


class Text(Value, frozen=True, tag="text"):
    text: str


class Image(Value, frozen=True, tag="image"):
    """An image by URL; inline images are `data:` URLs."""

    url: str


class Reasoning(Value, frozen=True, tag="reasoning"):
    """Reasoning of an earlier assistant turn, sent back by the client."""

    text: str
    signature: str | None = None


class ToolCall(Value, frozen=True, tag="tool_call"):
    """A call of an earlier assistant turn. `arguments` is JSON text exactly as it was streamed."""

    id: str
    name: str
    arguments: str


class ToolResult(Value, frozen=True, tag="tool_result"):
    call_id: str
    parts: tuple[Text | Image, ...] = ()
    is_error: bool = False


Part = Text | Image | Reasoning | ToolCall | ToolResult


class Message(Value, frozen=True):
    """One turn. A `tool` message has exactly one `ToolResult`. An Anthropic user turn with results becomes several
    messages, in the order of its blocks."""

    role: Role
    parts: tuple[Part, ...]
    name: str | None = None


class Tool(Value, frozen=True):
    """A function that the model may call. Codecs drop tools of unsupported types and do not reject the request."""

    name: str
    parameters: dict[str, Any]
    """A JSON schema; `{}` when the client gave none."""
    description: str | None = None
    strict: bool = False


class ToolChoice(Value, frozen=True):
    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None
    parallel: bool = True
    allowed: tuple[str, ...] | None = None
    """Names of the only tools that may be called; `None`: all. The prompt lists all of them anyway."""


class OutputFormat(Value, frozen=True):
    """A constraint on the output: `schema` for json_schema, `text` for regex and grammar, `choices` for choice."""

    kind: Literal["json_object", "json_schema", "regex", "grammar", "choice"]
    schema: dict[str, Any] | None = None
    text: str | None = None
    choices: tuple[str, ...] = ()


class Thinking(Value, frozen=True):
    """With `enabled=None` the model's template decides."""

    enabled: bool | None = None
    effort: str | None = None
    budget_tokens: int | None = None


class Sampling(Value, frozen=True):
    """Sampling parameters and stop conditions, validated by the codecs. `None`: the client did not set it."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repetition_window: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    logprobs: bool = False
    top_logprobs: int = 0


class GenerateRequest(Value, frozen=True):
    """A conversation to continue, or (for `/v1/completions`) a raw prompt.

    Exactly one of `messages` and `prompt` is given. `prompt` is text or token ids, unchanged.
    """

    model: str
    messages: tuple[Message, ...] = ()
    prompt: Prompt | None = None
    more_prompts: tuple[Prompt, ...] = ()
    """Completions only: further prompts. Each prompt gets its own `n` choices, in the order of the prompts."""
    echo: bool = False
    """Completions only: return the prompt before the continuation."""
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    output: OutputFormat | None = None
    thinking: Thinking = Thinking()
    sampling: Sampling = Sampling()
    stream: bool = False
    include_usage: bool = False
    """Whether a stream reports usage: OpenAI `stream_options.include_usage`; True in dialects that always do."""
    template_args: dict[str, Any] = {}
    """`chat_template_kwargs`: extra variables for the model's own template."""
    user: str | None = None
    metadata: dict[str, Any] = {}
    """Request fields that the response repeats (Responses API)."""
    dropped_tools: tuple[str, ...] = ()
    """Types of tools that the codec dropped because no local model can run them; reported in a header."""

    @property
    def one_per_prompt(self) -> tuple[GenerateRequest, ...]:
        """A request for each prompt; this request alone where there is only one, or a conversation."""
        if not self.more_prompts:
            return (self,)
        prompts = (self.prompt, *self.more_prompts)
        return tuple(msgspec.structs.replace(self, prompt=prompt, more_prompts=()) for prompt in prompts)

    @property
    def num_choices(self) -> int:
        """The choices of the response."""
        return self.sampling.n * (1 + len(self.more_prompts))

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that the response may call."""
        allowed = self.tool_choice.allowed
        return self.tools if allowed is None else tuple(tool for tool in self.tools if tool.name in allowed)
