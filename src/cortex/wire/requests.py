"""The internal request. Every dialect parses into it, and nodes read nothing else.

A field that the client left out stays `None`. The node fills it from the model's `generation_config.json`, then from
our defaults.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from cortex.wire.fields.request_class import RequestClass, level_of

Prompt = str | tuple[int, ...]
"""Text or token ids."""
Role = Literal["system", "developer", "user", "assistant", "tool"]


class Value(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of the immutable values on the wire."""


class Text(Value, frozen=True, tag="text"):
    text: str


Detail = Literal["auto", "low", "high"]


class PicturePart(Value, frozen=True, tag="picture"):
    """A picture: its file, or the address of one. In a packed request it has neither, but the number of its file among
    those that are packed, and its size."""

    data: bytes = b""
    media_type: str = ""
    """As the client declared it."""
    url: str = ""
    detail: Detail = "auto"
    param: str = ""
    """Where it is in the body of the client, for errors."""
    number: int = 0
    num_bytes: int = 0
    width: int = 0
    """The upright picture's, as the header of its file says."""
    height: int = 0


class Reasoning(Value, frozen=True, tag="reasoning"):
    """Reasoning of an earlier assistant turn, sent back by the client."""

    text: str
    signature: str | None = None


class ToolCall(Value, frozen=True, tag="tool_call"):
    """A call of an earlier assistant turn. `arguments` is JSON text exactly as it was streamed."""

    id: str
    name: str
    arguments: str


TOOL_ERROR = "The tool reported an error:"


class ToolResult(Value, frozen=True, tag="tool_result"):
    call_id: str
    parts: tuple[Text | PicturePart, ...] = ()
    is_error: bool = False

    @property
    def marked_parts(self) -> tuple[Text | PicturePart, ...]:
        """The parts, with a line before those of an error: prompts have no other place to say it."""
        return (Text(text=TOOL_ERROR), *self.parts) if self.is_error else self.parts


Part = Text | PicturePart | Reasoning | ToolCall | ToolResult


class Message(Value, frozen=True):
    """One turn. A `tool` message has exactly one `ToolResult`. An Anthropic user turn with results becomes several
    messages, in the order of its blocks."""

    role: Role
    parts: tuple[Part, ...]
    name: str | None = None


class Tool(Value, frozen=True):
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any]
    """A JSON schema; `{}` when the client gave none."""
    description: str | None = None
    strict: bool = False
    is_custom: bool = False
    """Whether the client expects free text instead of JSON arguments. To the model it is a function with the one text
    parameter `input`; the codecs translate its calls."""
    shape: Literal["local_shell", "shell", "apply_patch"] | None = None
    """The published type of tool that the client runs, whose calls are items of their own type (Responses API)."""
    namespace: str | None = None
    """The group that the tool is of, and its name there (Responses API); `name` has both."""
    own_name: str | None = None


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
    param: str = "response_format"
    """The field of the client that it is from, for errors."""


EFFORT_TOKENS = {"minimal": 512, "low": 1024, "medium": 8192}
"""Reasoning token limits of efforts, for models without efforts of their own. Higher efforts have no limit."""


def effort_of(budget_tokens: int | None) -> str | None:
    """The effort for a budget of reasoning; None without one."""
    if budget_tokens is None:
        return None
    return next((effort for effort, tokens in EFFORT_TOKENS.items() if budget_tokens <= tokens), "high")


class Thinking(Value, frozen=True):
    """With `enabled=None` the model's template decides, unless `off_by_default`."""

    enabled: bool | None = None
    effort: str | None = None
    budget_tokens: int | None = None
    shown: bool = True
    """Whether reasoning is part of the response."""
    inline: bool = False
    """Whether reasoning is part of the text, between the tags `<think>` and `</think>`."""
    summarized: bool = False
    """Whether the client reads reasoning as a summary, in a dialect that has both."""
    off_by_default: bool = False
    """Whether a request without reasoning options gets none from a model that can omit it."""

    @property
    def switch(self) -> bool | None:
        """The value for the template's switch; None: the template decides."""
        return False if self.enabled is None and self.off_by_default else self.enabled


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
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be drawn; empty: all."""
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    """Log-probabilities of the prompt's tokens with this many top tokens; None: not of the prompt."""
    speculation: Literal["off"] | None = None
    """`off`: no draft tokens are checked; the response is the same. `None`: as the model is loaded."""


class GenerateRequest(Value, frozen=True):
    """A conversation to continue, or (for `/v1/completions`) a raw prompt.

    Exactly one of `messages` and `prompt` is given, unless it `loads_only`. `prompt` is text or token ids, unchanged.
    """

    model: str
    messages: tuple[Message, ...] = ()
    prompt: Prompt | None = None
    more_prompts: tuple[Prompt, ...] = ()
    """Completions only: further prompts. Each prompt gets its own `n` choices, in the order of the prompts."""
    suffix: str | None = None
    """Text that follows the prompt's continuation: the model fills in between. Only with one prompt, which is text."""
    middle: str = ""
    """With a suffix: the beginning of the infill."""
    context_files: tuple[tuple[str, str], ...] = ()
    """With a suffix: names and texts of other files."""
    echo: bool = False
    """Completions only: return the prompt before the continuation."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many tokens at the end of the prompt; -1: as many as fit into the context."""
    pictures: tuple[PicturePart, ...] = ()
    """The pictures in the messages of a packed request, by their numbers."""
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    as_functions: bool = False
    """Chat only: the client sent `functions` and expects one `function_call` instead of `tool_calls`."""
    output: OutputFormat | None = None
    prediction: str | None = None
    """Text that the response is expected to repeat, which makes it faster."""
    thinking: Thinking = Thinking()
    sampling: Sampling = Sampling()
    stream: bool = False
    include_usage: bool = False
    """Whether a stream reports usage: OpenAI `stream_options.include_usage`; True in dialects that always do."""
    continuous_usage: bool = False
    """Whether every chunk of a stream reports the usage so far."""
    timings: bool = False
    """Whether every chunk of a stream, and a whole response, reports the time so far, as llama.cpp does."""
    return_token_ids: bool = False
    """Whether the response has the ids of its tokens and of those of the prompt."""
    template_args: dict[str, Any] = {}
    """`chat_template_kwargs`: extra variables for the model's own template."""
    user: str | None = None
    tenant: bytes = b""
    """The tenant with which it shares cached prefixes (`wire.tenant`): from the client's salt and, at a node, the
    gateway's header."""
    metadata: dict[str, Any] = {}
    """Request fields that the response repeats (Responses API)."""
    truncate: bool = False
    """Whether the oldest messages may be dropped to make the prompt fit: `truncation: "auto"` (Responses API),
    `truncate` (Ollama)."""
    most_context_tokens: int | None = None
    """A cap on prompt and response together, below the context of the model: `num_ctx` (Ollama)."""
    loads_only: bool = False
    """The request has no prompt and asks only that the model is loaded (Ollama)."""
    request_class: RequestClass | None = None
    """The requested class, and at a node the class in which it is served; None for that of its key."""
    echoes_tier: bool = False
    """Whether the response says in which service tier it was served: the request names one."""
    keep_alive_s: float | None = None
    """How long the model should stay loaded after the response (Ollama). 0: unload it. Other values have no effect."""
    dropped_tools: tuple[str, ...] = ()
    """Types of tools that the codec dropped because no local model can run them; reported in a header."""
    unenforced: tuple[str, ...] = ()
    """Paths of formats in the body that the codec cannot constrain the output to; reported in a header."""
    ignored_fields: tuple[str, ...] = ()
    """Fields of the body that the codec does not know; reported in a header."""

    @property
    def level(self) -> int:
        """The level of the request's class."""
        return level_of(self.request_class or "default")

    @property
    def unloads_only(self) -> bool:
        """The request has no prompt and asks only that the model is unloaded."""
        return self.loads_only and self.keep_alive_s == 0

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
        if self.tool_choice.allowed is None:
            return self.tools
        allowed = frozenset(self.tool_choice.allowed)
        return tuple(tool for tool in self.tools if tool.name in allowed)

    @property
    def custom_tools(self) -> frozenset[str]:
        """Names of the tools whose calls are free text to the client."""
        return frozenset(tool.name for tool in self.tools if tool.is_custom)
