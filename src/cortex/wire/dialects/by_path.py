"""The table of each path whose bodies a server may get that is not ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cortex.wire.dialects import llama_cpp_infill, openai_chat, openai_completions
from cortex.wire.fields.tables import opaque, pooling
from cortex.wire.fields.tables.table import FieldTable
from cortex.wire.opaque.routes import PATHS as OPAQUE_PATHS

TABLES: Final[Mapping[str, FieldTable]] = {
    **{codec.PATH: codec.FIELDS for codec in (openai_chat, openai_completions, llama_cpp_infill)},
    "/v1/embeddings": pooling.EMBEDDINGS,
    "/embed": pooling.EMBED,
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), pooling.RERANK),
    **dict.fromkeys(("/v1/score", "/score"), pooling.SCORE),
    **dict.fromkeys(OPAQUE_PATHS, opaque.FIELDS),
}
