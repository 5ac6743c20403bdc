"""Fields of `POST /v1/embeddings`, of TEI's `/embed`, of the rerank routes and of vLLM's `/score`."""

from __future__ import annotations

from cortex.wire.fields.tables.shared import PRIORITY
from cortex.wire.fields.tables.table import BodyField, FieldTable, content, honoured, rejected, tolerated

_TOKENS = "more tokens of a text are cut off; -1: as many as the model takes. Without it, a longer text gets a 400"
_TRUNCATION = (
    honoured("truncate_prompt_tokens", 8, _TOKENS),
    honoured("truncation_direction", "Left", "`Left` or `Right`, which is the default"),
)
_ACCOUNT = (honoured("model", "other"), honoured("user", "u"))
_RAW = honoured("raw_scores", True, "without the activation that maps scores to 0 to 1")
_IGNORED: tuple[BodyField, ...] = (
    PRIORITY,
    tolerated("request_id", "r"),
    tolerated("cache_salt", "s", "nothing is cached"),
)

EMBEDDINGS = FieldTable(
    _ACCOUNT,
    (
        content("input", "other", "a string, strings, token ids, or arrays of token ids"),
        honoured("dimensions", 8, "the first elements of a vector, at length one again if the model's vectors are"),
        honoured("encoding_format", "base64", "`float`, or `base64`: little-endian float32"),
        honoured("prompt_name", "query", "one of the prompts of the model's files precedes each text"),
        honoured("input_type", "query", "`query` or `document`, and their other names: the model's prompt for it"),
        honoured("normalize", True, "vectors at length one; default: as the model's files say"),
        honoured("loads_only", True, "only loads the model; `input` is empty", input=[]),
        rejected("add_special_tokens", False, "send the texts as token ids to leave them out", True),
        rejected("messages", [], "send texts in 'input'"),
    ),
    _TRUNCATION,
    _IGNORED,
)
EMBED = FieldTable(
    _ACCOUNT,
    (
        content("inputs", "other", "a string or strings"),
        honoured("dimensions", 8),
        honoured("normalize", False, "vectors at length one, which is the default"),
        honoured("prompt_name", "query"),
        honoured("truncate", True, "a text that is too long is cut off instead of rejected"),
        honoured("truncation_direction", "Left", truncate=True),
    ),
)
RERANK = FieldTable(
    _ACCOUNT,
    (
        content("query", "other"),
        content("documents", ["other"], "strings, or objects with `text`"),
        content("texts", ["other"], "TEI's name for `documents`: the response has TEI's shape", documents=None),
        honoured("top_n", 1, "the best, as many as this"),
        honoured("return_documents", True),
        honoured("return_text", True, "TEI's name for `return_documents`"),
        honoured("instruction", "other", "what a reranker with instructions should look for"),
        honoured("max_tokens_per_doc", 8, "more tokens of a query with its document are cut off"),
        honoured("truncate", True, "a pair that is too long is cut off instead of rejected"),
        rejected("rank_fields", ["x"], "send documents as strings, or as objects with 'text'", ["text"]),
    ),
    (_RAW,),
    _TRUNCATION,
    _IGNORED,
    (tolerated("max_chunks_per_doc", 1),),
)
SCORE = FieldTable(
    _ACCOUNT,
    (
        content("text_1", "other", "a string or strings: one for all of `text_2`, or one for each"),
        content("text_2", ["other"], "a string or strings"),
        content("queries", "other", "another name for `text_1`", text_1=None),
        content("documents", ["other"], "another name for `text_2`", text_2=None),
        honoured("instruction", "other", "what a reranker with instructions should look for"),
    ),
    (_RAW,),
    _TRUNCATION,
    _IGNORED,
)
