"""A request for vectors or scores, independent of its route's field names."""

from __future__ import annotations

from typing import Literal

import msgspec

from cortex.wire.fields.request_class import RequestClass

Task = Literal["embed", "score"]
Shape = Literal["openai", "rerank", "tei_embed", "tei_rerank", "score"]
"""Whose form a response has: OpenAI's embeddings, the rerank of Jina and Cohere, those of TEI, vLLM's scores."""


class PoolingRequest(msgspec.Struct, frozen=True):
    """Immutable. Fields that the client left out have the defaults of their route."""

    model: str
    shape: Shape
    texts: tuple[str, ...] = ()
    """The texts to embed; for scores, the documents."""
    tokens: tuple[tuple[int, ...], ...] = ()
    """Texts that the client has tokenised; then there are no `texts`."""
    queries: tuple[str, ...] = ()
    """For scores: one for each text, or one for all of them."""
    loads_only: bool = False
    """The request has no text and asks only that the model is loaded (Ollama)."""
    texts_field: str = "input"
    """Where the client has the texts, for errors."""
    queries_field: str = ""
    dimensions: int | None = None
    """The first of a vector's elements, as many as this."""
    as_base64: bool = False
    normalize: bool | None = None
    """None: as the model's files say."""
    truncate_to: int | None = None
    """The most tokens of a text, the rest is cut off; -1: as many as the model takes; None: nothing is cut off."""
    truncates_left: bool = False
    """Whether the beginning is cut off instead of the end."""
    prompt_name: str | None = None
    """The model's prompt that precedes each text."""
    purpose: Literal["query", "document"] | None = None
    """The kind of texts; models with a prompt for it use that prompt."""
    instruction: str | None = None
    """The instruction for a reranker; None for its default."""
    top_n: int | None = None
    """How many of the best documents are returned, best first; None: all."""
    returns_documents: bool = False
    raw_scores: bool = False
    """Without the activation that maps scores to 0 to 1."""
    user: str | None = None
    request_class: RequestClass | None = None
    """The requested class; None for that of its key."""
    ignored_fields: tuple[str, ...] = ()

    @property
    def task(self) -> Task:
        return "embed" if self.shape in ("openai", "tei_embed") else "score"

    @property
    def num_texts(self) -> int:
        return len(self.texts) or len(self.tokens)
