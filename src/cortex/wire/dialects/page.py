"""Writes docs/fields.md from the field tables: `python -m cortex.wire.dialects.page docs/fields.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from cortex.wire.dialects.anthropic_messages import fields as anthropic_messages
from cortex.wire.dialects.openai_chat import fields as openai_chat
from cortex.wire.dialects.openai_responses import fields as openai_responses
from cortex.wire.dialects.registry import DIALECTS
from cortex.wire.fields.tables import pooling
from cortex.wire.fields.tables.table import BodyField, FieldTable, Kind, Treatment
from cortex.wire.node import headers

_PATHS: dict[FieldTable, str] = {}
for codec in DIALECTS.values():
    _PATHS.setdefault(codec.fields, codec.path)  # compaction has the fields of responses
TABLES = {
    path.removeprefix("/v1/").removeprefix("/").removesuffix("/completions"): table for table, path in _PATHS.items()
}
"""By the column of the page."""
POOLING_TABLES = {
    "embeddings": pooling.EMBEDDINGS,
    "embed": pooling.EMBED,
    "rerank": pooling.RERANK,
    "score": pooling.SCORE,
}

INTRODUCTION = f"""\
# Fields of requests

Generated from the field tables by `make docs`; edit those, not this page. Every parser reads through its table.

- **honoured**: it does what it says.
- **tolerated**: it has no effect, and the response is right without it.
- **rejected**: a 400 that names it, because the response would differ from the request. Values that ask for nothing
  (`false`, `0`, an empty list) are accepted.
- empty: not a field of this dialect. Such a field is ignored, and the header `{headers.IGNORED_FIELDS}` lists it.

The table says what a gateway does; where a node that is called directly does something else, the note says so. `null`
is the same as an absent field. The columns are
{", ".join(f"`{path}`" for path in _PATHS.values())}.
"""

TOOLS = f"""\
## Types of tools

Tools of other types run on a vendor's servers. Alongside tools that the client runs they are left out, and the header
`{headers.DROPPED_TOOLS}` lists them; agents always send some. A request that has only such tools, or that forces one of
them, is rejected. The response repeats only the tools that are in force.

Tools work with every chat model. Where a model's template has no place for them, they are described in its system
message, one JSON object per line between `<tools>` tags, and the model is asked to write calls as
`<tool_call>{{"name": …, "arguments": …}}</tool_call>`; results follow between `<tool_response>` tags. A forced call is
constrained to that form. `/v1/models` has a note for such models.
"""

PICTURES = """\
## Pictures

A picture is a part of a message, or of the result of a tool: `image_url` of `/v1/chat/completions` and `input_image` of
`/v1/responses` with a `data:` URL in base64, an `image` block of `/v1/messages` with base64, `images` of Ollama's
routes. JPEG, PNG, WebP and GIF are read, by their content and whatever type is declared; of an animated file the first
frame, and what is transparent shows a white ground. Pictures are turned upright as their EXIF data say.

`detail` is `low` (at most about 256 tokens), `high` or `original` (the most that the model was made for) or `auto`. How
many tokens a picture takes follows from its size; `/v1/messages/count_tokens` and `/v1/responses/input_tokens` count it
as the prompt would. The settings under `[pictures]` in `neuron.toml` limit bytes, pixels, number and aspect ratio; the
error names the picture (`messages[2].content[1]`). A model that reads text only rejects pictures, and the error names
models that the key may use and that read them.

An https address instead of a file is rejected, unless the operator lets the gateway fetch pictures (`pictures.urls` in
`cortex.toml`). Files of a vendor (`file_id`) are rejected.
"""

SCHEMAS = f"""\
## Schemas

An object has only the properties that its schema lists, as with Ollama, llama.cpp and vLLM, unless the schema says
otherwise (`additionalProperties`, `patternProperties`), lists none, or describes the object in several parts that are
more than lists of properties. Properties without a `type` make an object.

Output that must follow a schema follows all of it, except parts that no grammar can express: a `pattern` with
lookahead, lookbehind, a backreference or a word boundary, formats such as `path`, `uniqueItems`, `not`, `if`,
`contains` and the like; of `oneOf` at least one option holds. The rest is enforced, and the header
`{headers.UNENFORCED}` lists the paths of such parts, and of grammars of custom tools. Calls follow their schema where
a call is forced, where only some tools are allowed, and together with an output format; elsewhere the model writes them
freely, `strict` or not.

A stream whose first bytes were keepalives cannot have these headers any more.
"""

POOLED = """\
## Embeddings, rerank and scores

The columns are `/v1/embeddings`, TEI's `/embed`, `/v1/rerank` (also `/rerank` and `/v2/rerank`: Jina, Cohere and TEI)
and vLLM's `/score` (also `/v1/score`). Texts are computed whole or not at all: one that is longer than the model's
context gets a 400, unless the request says that it may be cut off.
"""


def fields_page() -> str:
    """The whole page as Markdown."""
    return "\n".join(
        [
            INTRODUCTION,
            *_table(["field", *TABLES, "note"], _rows(TABLES)),
            "",
            TOOLS,
            *_kinds_table(chat=openai_chat.TOOLS, responses=openai_responses.TOOLS, messages=anthropic_messages.TOOLS),
            "",
            "## Input items of `/v1/responses`\n",
            "Items of other types are rejected: the model would not see them.\n",
            *_kinds_table(responses=(*openai_responses.ITEMS, *openai_responses.ITEMS_OF_GATEWAYS)),
            "",
            "## Content blocks of `/v1/messages`\n",
            "Blocks of other types are rejected: the model would not see them.\n",
            *_kinds_table(messages=anthropic_messages.BLOCKS),
            "",
            PICTURES,
            SCHEMAS,
            POOLED,
            *_table(["field", *POOLING_TABLES, "note"], _rows(POOLING_TABLES)),
            "",
        ]
    )


def _rows(tables: Mapping[str, FieldTable]) -> list[list[str]]:
    names = dict.fromkeys(one.name for table in tables.values() for one in table)
    return sorted((_row(name, tables) for name in names), key=lambda row: row[0].strip("`"))


def _row(name: str, tables: Mapping[str, FieldTable]) -> list[str]:
    found = [_by_gateway(dialect, table.get(name)) for dialect, table in tables.items()]
    return [f"`{name}`", *("" if one is None else one.treatment.value for one in found), _note(found)]


def _by_gateway(dialect: str, one: BodyField | None) -> BodyField | None:
    """A gateway's treatment of a field, if different from a node's."""
    if dialect != "responses" or one is None or one.name not in openai_responses.OF_GATEWAYS:
        return one
    return BodyField(one.name, Treatment.HONOURED, one.example, openai_responses.OF_GATEWAYS[one.name])


def _note(found: Iterable[BodyField | None]) -> str:
    notes = dict.fromkeys(one.note for one in found if one is not None and one.note)
    return "; ".join(notes).replace("|", "\\|")


def _kinds_table(**kinds_by_dialect: Sequence[Kind]) -> Iterator[str]:
    rows = [
        [dialect, f"`{kind.name}`", kind.treatment.value, kind.note]
        for dialect, kinds in kinds_by_dialect.items()
        for kind in kinds
    ]
    yield from _table(["dialect", "type", "", "note"], rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(fields_page(), encoding="utf-8")
