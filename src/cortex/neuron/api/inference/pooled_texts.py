"""From the texts of a request to those that a model pools: its prompts, its template, its limits. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from msgspec import structs

from cortex.neuron.engine.request import PooledTexts
from cortex.neuron.models.pooling.config import NormalizeStep, PoolingConfig
from cortex.neuron.text.tokenizer.encoder import TextsToEncode
from cortex.neuron.tokenizer_process.protocol import packed
from cortex.wire.errors import InvalidValue, shorten, text_too_long
from cortex.wire.pooling.request import PoolingRequest

MAX_TOKENS: Final = 1 << 22
"""The limit for all texts of a request together."""
MAX_CHARACTERS: Final = 8 * MAX_TOKENS
"""The limit for all pairs of a request together. A query that all documents share counts once for each of them."""
MAX_ELEMENTS: Final = 1 << 23
"""The limit for all vectors of a response together: as JSON they take about 160 MB."""
INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
"""What rerankers with instructions look for, unless a request says otherwise."""
_PROMPTS: Final[Mapping[str, tuple[str, ...]]] = {
    "query": ("query", "search_query", "retrieval.query"),
    "document": ("document", "passage", "search_document", "retrieval.passage"),
}
"""What models call their prompts for a purpose."""


def texts_to_encode(request: PoolingRequest, pooling: PoolingConfig, context_tokens: int) -> TextsToEncode | None:
    """What is tokenised; None if the client did that. Raises InvalidValue."""
    max_tokens = request.truncate_to
    if max_tokens is not None:
        max_tokens = context_tokens if max_tokens < 0 else min(max_tokens, context_tokens)
    if request.tokens:
        return None
    if request.task == "score":
        _check_pairs(request, pooling)
    texts, queries = request.texts, request.queries
    if pooling.lowercase:
        texts, queries = tuple(map(str.lower, texts)), tuple(map(str.lower, queries))
    if request.task == "embed":
        prompt = _prompt(request, pooling)
        return TextsToEncode(tuple(prompt + text for text in texts), (), max_tokens, request.truncates_left)
    if pooling.task == "embed":  # whose scores are cosines
        before_query, before_text = _pair_prompts(request, pooling)
        prompted = (*(before_query + query for query in queries), *(before_text + text for text in texts))
        return TextsToEncode(prompted, (), max_tokens, request.truncates_left)
    queries = queries * len(texts) if len(queries) == 1 else queries
    if pooling.template is None:
        return TextsToEncode(texts, queries, max_tokens, request.truncates_left)
    instruction = request.instruction or INSTRUCTION
    pairs = zip(queries, texts, strict=True)
    filled, literal = zip(*(_filled(pooling.template, instruction, *pair) for pair in pairs), strict=True)
    return TextsToEncode(filled, (), max_tokens, literal=literal)


def _check_pairs(request: PoolingRequest, pooling: PoolingConfig) -> None:
    """Raises InvalidValue for more text than one request should have, before any pair is built."""
    num_pairs = len(request.texts)
    around = 0 if pooling.template is None else len(pooling.template) + len(request.instruction or INSTRUCTION)
    in_queries = sum(map(len, request.queries)) * (num_pairs if len(request.queries) == 1 else 1)
    total = sum(map(len, request.texts)) + in_queries + around * num_pairs
    if total > MAX_CHARACTERS:
        raise InvalidValue(
            f"{num_pairs} documents, each with its query, have {total} characters; one request may have "
            f"{MAX_CHARACTERS}. Send a shorter query, or the documents in several requests.",
            param=request.queries_field,
        )


def _filled(template: str, instruction: str, query: str, document: str) -> tuple[str, tuple[tuple[int, int], ...]]:
    """The template with the texts, and where they are in it: they must not end the template's turns. Not by
    `str.format`: the texts may have braces, and one text must not become a part of another."""
    parts = {"{instruction}": instruction, "{query}": query, "{document}": document}
    written, rest, spans = "", template, []
    for name, text in parts.items():
        before, _, rest = rest.partition(name)
        written += before
        spans.append((len(written), len(written) + len(text)))
        written += text
    return written + rest, tuple(spans)


def _prompt(request: PoolingRequest, pooling: PoolingConfig) -> str:
    """What precedes each text. Raises InvalidValue."""
    prompts = pooling.prompts
    if request.prompt_name is not None:
        if request.prompt_name not in prompts:
            known = f"it has {', '.join(map(shorten, prompts))}" if prompts else "it has none"
            raise InvalidValue(
                f"{request.model} has no prompt {shorten(request.prompt_name)!r}; {known}.", param="prompt_name"
            )
        return prompts[request.prompt_name]
    if request.purpose is not None:
        return next((prompts[name] for name in _PROMPTS[request.purpose] if name in prompts), "")
    return prompts[pooling.default_prompt] if pooling.default_prompt is not None else ""


def _pair_prompts(request: PoolingRequest, pooling: PoolingConfig) -> tuple[str, str]:
    """What precedes queries, and what precedes documents. The two sides of `/score` are alike."""
    if request.shape == "score":
        prompt = _prompt(request, pooling)
        return prompt, prompt
    query, document = (_prompt(structs.replace(request, purpose=purpose), pooling) for purpose in _PROMPTS)
    return query, document


def engine_texts(
    request: PoolingRequest, pooling: PoolingConfig, encoded: PooledTexts | None, vector_width: int
) -> PooledTexts:
    """The tokens for the engine, and how vectors are cut. Raises InvalidValue for what the model cannot do."""
    if encoded is None:
        encoded = PooledTexts(b"".join(map(packed, request.tokens)), tuple(map(len, request.tokens)))
    dimensions = request.dimensions
    if dimensions is not None:
        allowed = pooling.dimensions
        if dimensions > vector_width or (allowed and dimensions not in (*allowed, vector_width)):
            choice = f"one of {', '.join(map(str, allowed))}" if allowed else f"at most {vector_width}"
            raise InvalidValue(
                f"{request.model} has vectors of {vector_width} elements; ask for {choice}.", param="dimensions"
            )
    if request.task == "score" and pooling.task == "embed":
        return replace(encoded, num_queries=len(request.queries))
    is_normal = any(isinstance(step, NormalizeStep) for step in pooling.steps)
    normalize = request.normalize if request.normalize is not None else is_normal and dimensions is not None
    return replace(encoded, dimensions=dimensions, normalize=normalize)


def check_lengths(texts: PooledTexts, context_tokens: int, vector_width: int, field: str = "input") -> None:
    """Raises InvalidValue for a text without tokens, or for more texts than one request should have,
    ContextLengthExceeded for a text that is too long. `field`: where the client has them."""
    num_tokens, num_elements = sum(texts.lengths), len(texts.lengths) * (texts.dimensions or vector_width)
    if num_tokens > MAX_TOKENS or num_elements > MAX_ELEMENTS:
        raise InvalidValue(
            f"{len(texts.lengths)} texts have {num_tokens} tokens, and their vectors {num_elements} elements; one "
            f"request may have {MAX_TOKENS} tokens and {MAX_ELEMENTS} elements. Send the texts in several requests.",
            param=field,
        )
    for index, length in enumerate(texts.lengths):
        if length == 0:
            raise InvalidValue(f"Text {index} has no tokens; leave it out.", param=field)
        if length > context_tokens:
            raise text_too_long(index, length, context_tokens)
