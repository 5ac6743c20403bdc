"""Parses the bodies of the routes for vectors and scores."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal

import msgspec

from cortex.wire.errors import MissingModel, shorten
from cortex.wire.fields.body import LARGEST_TOKEN, Fields
from cortex.wire.fields.request_class import asked_class
from cortex.wire.fields.tables import pooling as tables
from cortex.wire.pooling.request import PoolingRequest, Task

MAX_TEXTS: Final = 4096
"""In one request."""
_MAX_WIDTH: Final = 1 << 20
_MAX_TOKENS: Final = 1 << 24
_PURPOSES: Final[Mapping[str, Literal["query", "document"]]] = {
    "query": "query",
    "search_query": "query",
    "retrieval.query": "query",
    "document": "document",
    "passage": "document",
    "search_document": "document",
    "retrieval.passage": "document",
}


def parse_embeddings(body: bytes) -> PoolingRequest:
    """`/v1/embeddings`. Raises a CortexError."""
    fields = tables.EMBEDDINGS.read(body)
    loads_only = fields.flag("loads_only") or False
    texts, tokens = _inputs(fields, "input") if not loads_only or fields.raw("input") else ((), ())
    if loads_only and (texts or tokens):
        raise fields.invalid("loads_only", "there is nothing to embed then; leave it or 'input' out")
    encoding = _choice(fields, "encoding_format", ("float", "base64")) or "float"
    purpose = fields.text("input_type")
    if purpose is not None and purpose not in _PURPOSES:
        raise fields.invalid("input_type", f"expected one of {', '.join(_PURPOSES)}")
    return PoolingRequest(
        fields.model(),
        "openai",
        texts,
        tokens,
        dimensions=fields.integer("dimensions", low=1, high=_MAX_WIDTH),
        as_base64=encoding == "base64",
        normalize=fields.flag("normalize"),
        prompt_name=fields.text("prompt_name"),
        purpose=None if purpose is None else _PURPOSES[purpose],
        loads_only=loads_only,
        user=fields.text("user"),
        request_class=asked_class(fields, tables.EMBEDDINGS.envelope),
        **_truncation(fields),
    )


def parse_embed(body: bytes) -> PoolingRequest:
    """TEI's `/embed`. Raises a CortexError."""
    fields = tables.EMBED.read(body)
    texts, _ = _inputs(fields, "inputs", may_be_tokens=False)
    return PoolingRequest(
        fields.model(),
        "tei_embed",
        texts,
        texts_field="inputs",
        dimensions=fields.integer("dimensions", low=1, high=_MAX_WIDTH),
        normalize=fields.flag("normalize") is not False,
        prompt_name=fields.text("prompt_name"),
        truncate_to=-1 if fields.flag("truncate") else None,
        truncates_left=_is_left(fields) and bool(fields.flag("truncate")),
        user=fields.text("user"),
        ignored_fields=fields.unknown,
    )


def parse_rerank(body: bytes) -> PoolingRequest:
    """`/rerank` of Jina, Cohere and TEI. Raises a CortexError."""
    fields = tables.RERANK.read(body)
    is_tei = "texts" in fields
    name = "texts" if is_tei else "documents"
    limit = fields.integer("max_tokens_per_doc", low=1, high=_MAX_TOKENS)
    truncation = _truncation(fields)
    if truncation["truncate_to"] is None:
        truncation["truncate_to"] = limit if limit is not None else -1 if fields.flag("truncate") else None
    return PoolingRequest(
        fields.model(),
        "tei_rerank" if is_tei else "rerank",
        _documents(fields, name),
        queries=(fields.required_text("query"),),
        texts_field=name,
        queries_field="query",
        instruction=fields.text("instruction"),
        top_n=fields.integer("top_n", low=1, high=LARGEST_TOKEN),
        returns_documents=bool(fields.flag("return_documents")) or bool(fields.flag("return_text")),
        raw_scores=bool(fields.flag("raw_scores")),
        user=fields.text("user"),
        request_class=asked_class(fields, tables.RERANK.envelope),
        **truncation,
    )


def parse_score(body: bytes) -> PoolingRequest:
    """vLLM's `/score`. Raises a CortexError."""
    fields = tables.SCORE.read(body)
    has_lists = "queries" in fields or "documents" in fields
    first = "queries" if has_lists and "text_1" not in fields else "text_1"
    second = "documents" if has_lists and "text_2" not in fields else "text_2"
    queries, texts = fields.texts(first), fields.texts(second)
    if not queries or not texts:
        raise fields.invalid(second if queries else first, "it is required: a string, or an array of strings")
    if len(queries) not in (1, len(texts)):
        raise fields.invalid(first, f"it has {len(queries)} texts for {len(texts)}; send one, or one for each")
    _check_count(fields, second, len(texts))
    return PoolingRequest(
        fields.model(),
        "score",
        texts,
        queries=queries,
        texts_field=second,
        queries_field=first,
        instruction=fields.text("instruction"),
        raw_scores=bool(fields.flag("raw_scores")),
        user=fields.text("user"),
        request_class=asked_class(fields, tables.SCORE.envelope),
        **_truncation(fields),
    )


ROUTES: Final[Mapping[str, Callable[[bytes], PoolingRequest]]] = {
    "/v1/embeddings": parse_embeddings,
    "/embed": parse_embed,
    "/v1/rerank": parse_rerank,
    "/v2/rerank": parse_rerank,
    "/rerank": parse_rerank,
    "/v1/score": parse_score,
    "/score": parse_score,
}
"""`POST` paths."""


MODEL_OPTIONAL: Final = frozenset({"/embed", "/rerank"})
"""Paths of TEI, whose servers have one model: its clients name none."""
_MODEL: Final = re.compile(rb'"model"\s*:(?!\s*null\b)')
_NULL_MODEL: Final = re.compile(rb'"model"\s*:\s*null\b')


def names_model(body: bytes) -> bool:
    return _MODEL.search(body) is not None


def with_model(body: bytes, model: str) -> bytes:
    """`body`, which names no model, with one. A body that is no object stays as it is; its parser reports why."""
    start, brace, rest = body.partition(b"{")
    if start.strip() or not brace:
        return body
    named = b'"model":' + msgspec.json.encode(model)
    if _NULL_MODEL.search(rest):  # null is the same as nothing
        return brace + _NULL_MODEL.sub(lambda _: named, rest, count=1)
    comma = b"" if rest.lstrip().startswith(b"}") else b","
    return brace + named + comma + rest


def only_model(models: Iterable[str], task: Task) -> str:
    """The model of a request that names none, of those that can do its task. Raises MissingModel."""
    found = sorted(set(models))
    if len(found) == 1:
        return found[0]
    kind = "embedding" if task == "embed" else "rerank"
    some = f"there are {len(found)}: {shorten(', '.join(found))}" if found else "there is none"
    raise MissingModel(
        f"The body names no model, and only where there is one {kind} model is it clear which; {some}. Set 'model', "
        "or add ?model= to the path.",
        param="model",
    )


def _inputs(
    fields: Fields, name: str, *, may_be_tokens: bool = True
) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """The texts, or the token ids of each text."""
    value = fields.raw(name)
    if isinstance(value, str):
        return (value,), ()
    values = fields.array(name, most=_MAX_TOKENS)
    if not values:
        raise fields.invalid(name, "it is required, and must not be empty")
    if all(isinstance(each, str) for each in values):
        _check_count(fields, name, len(values))
        return tuple(values), ()
    if may_be_tokens and _are_tokens(values):
        return (), (tuple(values),)
    if may_be_tokens and all(isinstance(each, list) and each and _are_tokens(each) for each in values):
        _check_count(fields, name, len(values))
        return (), tuple(map(tuple, values))
    expected = "a string or an array of strings" + (", or token ids" if may_be_tokens else "")
    raise fields.invalid(name, f"expected {expected}")


def _are_tokens(values: list[Any]) -> bool:
    return all(type(each) is int and 0 <= each <= LARGEST_TOKEN for each in values)


def _documents(fields: Fields, name: str) -> tuple[str, ...]:
    documents = fields.array(name)
    if not documents:
        raise fields.invalid(name, "it is required, and must not be empty")
    _check_count(fields, name, len(documents))
    texts: list[Any] = [each.get("text") if isinstance(each, dict) else each for each in documents]
    if not all(isinstance(each, str) for each in texts):
        raise fields.invalid(name, "expected strings, or objects with 'text'")
    return tuple(texts)


def _check_count(fields: Fields, name: str, count: int) -> None:
    if count > MAX_TEXTS:
        raise fields.invalid(name, f"it has {count} texts, at most {MAX_TEXTS} are allowed")


def _truncation(fields: Fields) -> dict[str, Any]:
    return {
        "truncate_to": fields.integer("truncate_prompt_tokens", low=-1, high=_MAX_TOKENS),
        "truncates_left": _is_left(fields),
        "ignored_fields": fields.unknown,
    }


def _is_left(fields: Fields) -> bool:
    return (_choice(fields, "truncation_direction", ("Left", "Right", "left", "right")) or "").lower() == "left"


def _choice(fields: Fields, name: str, known: tuple[str, ...]) -> str | None:
    value = fields.text(name)
    if value is not None and value not in known:
        raise fields.invalid(name, f"expected one of {', '.join(known)}")
    return value
