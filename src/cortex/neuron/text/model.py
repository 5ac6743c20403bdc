"""The text side of a model: tokenizer, templates and output syntax, without its weights; and the prompts of models that
fill in text between a prefix and a suffix.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from cortex.neuron.families.family import ADDRESSED, ReasoningMarkers
from cortex.neuron.families.tool_calls import HARMONY, ToolSyntax
from cortex.neuron.pictures.spec import PictureSpec
from cortex.neuron.text import defaults, files
from cortex.neuron.text.grammar.request import LeadingReasoning, build_grammar
from cortex.neuron.text.grammar.trial import GrammarTrial
from cortex.neuron.text.output import harmony
from cortex.neuron.text.output.addressed import AddressedSplitter
from cortex.neuron.text.output.harmony import HarmonyParser
from cortex.neuron.text.output.parser import OutputParser, new_call_id
from cortex.neuron.text.output.reasoning import (
    ReasoningSplitter,
    ReasoningWatch,
    ThinkingReader,
    closes_reasoning,
    opens_reasoning,
)
from cortex.neuron.text.template import template_source
from cortex.neuron.text.template.chat_template import CHATML, ChatTemplate
from cortex.neuron.text.template.detect import reasoning_markers, tool_syntax
from cortex.neuron.text.template.literal_content import LiteralContent
from cortex.neuron.text.template.pictures import pictures_in
from cortex.neuron.text.template.prompt import (
    NO_RULES,
    PromptRules,
    Rendered,
    prompt_text,
    render_conversation,
    render_raw,
)
from cortex.neuron.text.template.template_source import TemplateSources
from cortex.neuron.text.text_files import TextFiles
from cortex.neuron.text.tokenizer.detokenizer import Detokenizer
from cortex.neuron.text.tokenizer.encoder import NoEncoder, TextEncoder
from cortex.neuron.text.tokenizer.tokenizer import Tokenizer
from cortex.neuron.text.tools.scanner import CallScanner
from cortex.neuron.text.tools.syntaxes import call_syntax
from cortex.neuron.weights.gguf.metadata import read_metadata
from cortex.wire.errors import TemplateRenderFailed, UnsupportedModality
from cortex.wire.fields.constraints import is_constrained
from cortex.wire.node.load_options import SamplingDefaults
from cortex.wire.node.protocol import Capabilities
from cortex.wire.requests import EFFORT_TOKENS, GenerateRequest

_MARKERS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
"""The control tokens before prefix, suffix and middle: Qwen, StarCoder, SantaCoder, GLM, DeepSeek, CodeLlama."""

_REPOSITORY_MARKERS = (("<|repo_name|>", "<|file_sep|>"), ("<repo_name>", "<file_sep>"), ("<reponame>", "<filename>"))
"""The control tokens before the name of a repository and of each of its files: Qwen, StarCoder 2, StarCoder."""
_PROJECT, _FILE = "myproject", "filename"
"""Names for the repository and the file of the gap, which clients do not send; those of llama.cpp."""


@dataclass(frozen=True)
class TextModel:
    """A model's tokenizer, template and output syntax. Immutable, safe to share between threads, no torch."""

    tokenizer: Tokenizer
    template: ChatTemplate
    tools_template: ChatTemplate
    """For requests with tools; the same as `template` unless the model has two."""
    generation: SamplingDefaults
    reasoning_end: tuple[int, ...] = ()
    """The tokens that end reasoning, laid out as templates write them; empty for a model that does not reason."""
    notes: tuple[str, ...] = ()
    pictures: PictureSpec | None = None
    """How the model takes pictures; None: it reads text only."""

    @classmethod
    def of(cls, files: TextFiles, encoder: TextEncoder) -> TextModel:
        """Encodes a short text: do not call it on the event loop."""
        tokenizer = Tokenizer(files.vocabulary, encoder)
        template, tools_template = _templates(files.templates)
        return cls(
            tokenizer,
            template,
            tools_template,
            files.generation,
            _reasoning_end(template, tokenizer),
            _notes(files.templates, tools_template),
            _usable(files.pictures, tokenizer),
        )

    @classmethod
    def without_encoder(
        cls, files: TextFiles, reasoning_end: tuple[int, ...], takes_tools: tuple[bool, bool]
    ) -> TextModel:
        """For a process that only turns tokens into text: rendering and encoding raise AssertionError. `takes_tools`:
        as the `takes_tools` of the complete model, so that no template is compiled."""
        template, tools_template = _templates(files.templates, *takes_tools)
        notes, tokenizer = _notes(files.templates, tools_template), Tokenizer(files.vocabulary, NoEncoder())
        pictures = _usable(files.pictures, tokenizer)
        return cls(tokenizer, template, tools_template, files.generation, reasoning_end, notes, pictures)

    @property
    def takes_tools(self) -> tuple[bool, bool]:
        """Whether `template` and `tools_template` have a place for the descriptions of tools."""
        return self.template.takes_tools, self.tools_template.takes_tools

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.tokenizer.eos_ids

    @cached_property
    def capabilities(self) -> Capabilities:
        found = _capabilities(self.template, self.notes, vision=self.pictures is not None)
        return msgspec.structs.replace(found, insert=markers(self.tokenizer) is not None)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, including control tokens in it; adds no token."""
        return self.tokenizer.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, control tokens spelled out."""
        return self.tokenizer.decode(ids)

    def render(self, request: GenerateRequest, rules: PromptRules = NO_RULES) -> Rendered:
        """The prompt. Raises TemplateRenderFailed, UnsupportedModality or InvalidValue; there is no fallback. Raises
        ContextLengthExceeded for a text that certainly has more tokens than `rules` allow, before it is tokenised.

        Do not call it on the event loop: 100k new tokens take a third of a second. Known turns cost almost nothing.
        """
        if request.prompt is not None:
            prompt = request.prompt
            if request.suffix is not None and isinstance(prompt, str):
                prompt = fill_in_prompt(prompt, request.suffix, self.tokenizer, request.middle, request.context_files)
            return render_raw(prompt, self.tokenizer, rules)
        template = self._template_for(request)
        # A placeholder in a message must not take the place of a picture.
        is_literal = not rules.control_tokens_in_messages or next(pictures_in(request), None) is not None
        literal_content = self._literal_content[template is self.template] if is_literal else None
        return render_conversation(
            request, template, self.tokenizer, self._reasoning_markers, literal_content, rules, self.pictures
        )

    def detokenizer(self, request: GenerateRequest) -> Detokenizer:
        """A detokenizer for one response. Control tokens are hidden, except those that its parser reads."""
        if self._is_harmony and request.prompt is not None:
            return Detokenizer(self.tokenizer, self.tokenizer.special_ids)
        return Detokenizer(self.tokenizer, self._hidden_ids if _has_calls(request) else self._hidden_without_calls)

    def parser(self, request: GenerateRequest, rendered: Rendered, index: int = 0) -> OutputParser | HarmonyParser:
        """A parser for choice `index` of the response. The response to a raw prompt is not parsed."""
        if request.prompt is not None:
            return OutputParser(None, None, index)
        if self._is_harmony:
            names = [tool.name for tool in request.callable_tools] if _has_calls(request) else None
            return HarmonyParser(names, new_call_id, index, self._opened_message(rendered))
        splitter = scanner = None
        if self._reasoning_markers is not None:
            splitter = self._splitter(rendered)
        if _has_calls(request):
            scanner = CallScanner(call_syntax(self._tool_syntax, request.callable_tools), new_call_id, index)
        return OutputParser(splitter, scanner, index)

    def grammar(self, request: GenerateRequest, rules: PromptRules = NO_RULES) -> str | None:
        """The grammar of the output, for `EngineRequest.grammar`; None: no constraint. Raises InvalidValue."""
        if not is_constrained(request):
            return None
        return self._grammar(request, self._leading_reasoning(request), rules)

    def response_grammar(self, request: GenerateRequest, rules: PromptRules = NO_RULES) -> str | None:
        """The grammar of the output after the reasoning; None: no constraint. Raises InvalidValue."""
        # In harmony a message of any channel may follow, and must not be more reasoning.
        if not self._is_harmony and not is_constrained(request):
            return None
        return self._grammar(request, LeadingReasoning.ABSENT, rules)

    def _grammar(self, request: GenerateRequest, reasoning: LeadingReasoning, rules: PromptRules) -> str | None:
        return build_grammar(
            request,
            self._grammar_trial,
            self._tool_syntax,
            self._reasoning_markers,
            reasoning,
            rules,
        )

    def may_reason(self, request: GenerateRequest) -> bool:
        """Whether the response to `request` may begin with reasoning."""
        if self._is_harmony:
            return request.prompt is None
        return self._reasoning_markers is not None and request.prompt is None and request.thinking.switch is not False

    def reasoning_budget(self, request: GenerateRequest) -> int | None:
        """Most tokens of reasoning: the client's, or those of its effort if the template knows no efforts."""
        thinking = request.thinking
        if thinking.budget_tokens is not None or self._template_for(request).mentions("reasoning_effort"):
            return thinking.budget_tokens
        return EFFORT_TOKENS.get(thinking.effort or "")

    def reasoning_watch(self, rendered: Rendered) -> ReasoningWatch:
        """A watch for one choice of a response that may begin with reasoning."""
        reading: ThinkingReader
        if self._is_harmony:
            reading = HarmonyParser((), new_call_id, 0, self._opened_message(rendered))
        else:
            reading = self._splitter(rendered)
        return ReasoningWatch(Detokenizer(self.tokenizer, self._hidden_without_calls), reading)

    def _opened_message(self, rendered: Rendered) -> str:
        """In harmony: the prompt's text after its last beginning of a message."""
        start, ids = self.tokenizer.whole_id(harmony.START), rendered.ids
        places = range(len(ids) - 1, -1, -1) if start is not None else ()
        place = next((place for place in places if ids[place] == start), None)
        return "assistant" if place is None else self.decode(ids[place + 1 :])

    def _splitter(self, rendered: Rendered) -> ReasoningSplitter | AddressedSplitter:
        assert self._reasoning_markers is not None, "the model has no reasoning markers"
        if self._reasoning_markers is ADDRESSED:
            return AddressedSplitter(starts_in_reasoning=rendered.starts_in_reasoning)
        return ReasoningSplitter(self._reasoning_markers, starts_in_reasoning=rendered.starts_in_reasoning)

    def _leading_reasoning(self, request: GenerateRequest) -> LeadingReasoning:
        markers = self._reasoning_markers
        if self._is_harmony and request.prompt is None:
            return LeadingReasoning.POSSIBLE
        if markers is None or request.prompt is not None:
            return LeadingReasoning.ABSENT
        picture = None if self.pictures is None else self.pictures.text
        prompt = prompt_text(request, self._template_for(request), self.tokenizer, picture=picture)
        if opens_reasoning(prompt.generation_prompt, markers):
            return LeadingReasoning.OPENED
        if request.thinking.switch is False or closes_reasoning(prompt.generation_prompt, markers):
            return LeadingReasoning.ABSENT
        return LeadingReasoning.POSSIBLE

    def _template_for(self, request: GenerateRequest) -> ChatTemplate:
        return self.tools_template if request.tools else self.template

    @cached_property
    def _grammar_trial(self) -> GrammarTrial:
        return GrammarTrial(self.tokenizer)

    @cached_property
    def _tool_syntax(self) -> ToolSyntax:
        return tool_syntax(self.tools_template, self.tokenizer.has_whole)

    @cached_property
    def _is_harmony(self) -> bool:
        return self._tool_syntax is HARMONY

    @cached_property
    def _literal_content(self) -> tuple[LiteralContent | None, LiteralContent | None]:
        """For the template with tools, and for the template without."""
        vocabulary = self.tokenizer.vocabulary
        if not vocabulary.control_texts:
            return None, None
        also = () if self.pictures is None else self.pictures.text.tokens
        return LiteralContent(vocabulary, self.tools_template, also), LiteralContent(vocabulary, self.template, also)

    @cached_property
    def _reasoning_markers(self) -> ReasoningMarkers | None:
        return reasoning_markers(self.template)

    @cached_property
    def _hidden_ids(self) -> frozenset[int]:
        if self._is_harmony:
            return self._hidden_without_calls
        markers = call_syntax(self._tool_syntax, ()).markers
        return self._hidden_without_calls - {self.tokenizer.whole_id(marker) for marker in markers}

    @cached_property
    def _hidden_without_calls(self) -> frozenset[int]:
        if self._is_harmony:
            return self.tokenizer.special_ids - {self.tokenizer.whole_id(marker) for marker in harmony.MARKERS}
        markers = self._reasoning_markers
        if markers is None:
            return self.tokenizer.special_ids
        whole = self.tokenizer.vocabulary.whole_tokens
        return self.tokenizer.special_ids - {
            token.id for token in whole if token.text and (token.text in markers.open or token.text in markers.close)
        }


@dataclass(frozen=True, slots=True)
class TextInspection:
    """The facts from a model's text files before it is used."""

    capabilities: Capabilities
    generation: SamplingDefaults


def inspect_text(path: Path, chat_template: str | None = None) -> TextInspection:
    """Inspects the model at `path`, from its templates and recommended options alone. `chat_template`: in place of its
    own.

    It builds no tokenizer, which would take a second and 100 MB for a large vocabulary. Raises TextModelError, or
    CheckpointError for a bad GGUF header. A template that takes all memory or all time does so here.
    """
    gguf = files.gguf_file(path)
    if gguf is not None:
        metadata = read_metadata(gguf).metadata
        sources, generation = template_source.from_gguf(metadata), defaults.from_gguf(metadata)
        has_vision = files.picture_spec(gguf) is not None
        insert = has_markers(frozenset(metadata.get("tokenizer.ggml.tokens") or ()).__contains__)
    else:
        sources, has_vision = template_source.from_directory(path), files.picture_spec(path) is not None
        generation = defaults.from_generation_config(files.read_json(path / "generation_config.json"))
        insert = has_markers(files.token_search(path))
    sources = sources if chat_template is None else TemplateSources(chat_template)
    template, tools_template = _templates(sources)
    for each in {template, tools_template}:
        _try_out(each)
    found = _capabilities(template, _notes(sources, tools_template), vision=has_vision)
    return TextInspection(msgspec.structs.replace(found, insert=insert), generation)


def _has_calls(request: GenerateRequest) -> bool:
    """Whether the parser looks for tool calls in the response."""
    return request.prompt is None and bool(request.tools) and request.tool_choice.mode != "none"


def _try_out(template: ChatTemplate) -> None:
    """Renders the shortest conversation. A template may reject it."""
    with contextlib.suppress(TemplateRenderFailed):
        template.render({"messages": [{"role": "user", "content": "x"}], "tools": None, "add_generation_prompt": True})


def _templates(
    sources: TemplateSources, takes_tools: bool | None = None, tools_takes_tools: bool | None = None
) -> tuple[ChatTemplate, ChatTemplate]:
    """For conversations without and with tools."""
    template = ChatTemplate(sources.default or sources.with_tools or CHATML, takes_tools=takes_tools)
    if not sources.with_tools:
        return template, template
    return template, ChatTemplate(sources.with_tools, takes_tools=tools_takes_tools)


def _usable(pictures: PictureSpec | None, tokenizer: Tokenizer) -> PictureSpec | None:
    """`pictures`, if the vocabulary has the tokens for them."""
    if pictures is None or any(tokenizer.whole_id(text) is None for text in pictures.text.tokens):
        return None
    return pictures


def _notes(sources: TemplateSources, tools_template: ChatTemplate) -> tuple[str, ...]:
    notes = []
    if not (sources.default or sources.with_tools):
        notes.append("the model has no chat template: conversations are written as ChatML")
    if not tools_template.takes_tools:
        notes.append("the chat template has no place for tools: they are described in the system message")
    return tuple(notes)


def _reasoning_end(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[int, ...]:
    if tool_syntax(template) is HARMONY:
        return tuple(tokenizer.encode(harmony.REASONING_END))
    markers = reasoning_markers(template)
    return () if markers is None else tuple(tokenizer.encode(f"\n{markers.close}{markers.follow}"))


def _capabilities(template: ChatTemplate, notes: tuple[str, ...], *, vision: bool) -> Capabilities:
    has_reasoning = tool_syntax(template) is HARMONY or reasoning_markers(template) is not None
    return Capabilities(tools=True, reasoning=has_reasoning, vision=vision, notes=notes)


def markers(tokenizer: Tokenizer) -> tuple[str, str, str] | None:
    """The markers in the vocabulary; None for a model that was not trained to fill in."""
    return next((three for three in _MARKERS if all(tokenizer.whole_id(each) is not None for each in three)), None)


def has_markers(is_token: Callable[[str], bool]) -> bool:
    """Whether a vocabulary that has not been built has all tokens of one model family."""
    return any(all(map(is_token, three)) for three in _MARKERS)


def fill_in_prompt(
    prefix: str, suffix: str, tokenizer: Tokenizer, middle: str = "", files: Sequence[tuple[str, str]] = ()
) -> str:
    """`middle`: the beginning of the text to fill in. `files`: names and texts of other files, which come first, with
    the tokens for repositories if the vocabulary has them.

    Raises UnsupportedModality for a model without the tokens.
    """
    found = markers(tokenizer)
    if found is None:
        raise UnsupportedModality(
            "This model has no tokens for filling in; choose one with the capability `insert` in /v1/models.",
            param="suffix",
        )
    return f"{_before(files, tokenizer)}{found[0]}{prefix}{found[1]}{suffix}{found[2]}{middle}"


def _before(files: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> str:
    if not files:
        return ""
    for repository, separator in _REPOSITORY_MARKERS:
        if tokenizer.whole_id(separator) is not None:
            begin = f"{repository}{_PROJECT}\n" if tokenizer.whole_id(repository) is not None else ""
            parts = "".join(f"{separator}{name}\n{text}" for name, text in files)
            return f"{begin}{parts}{separator}{_FILE}\n"
    return "".join(f"{text}\n" for _, text in files)
