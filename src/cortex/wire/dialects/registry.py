"""The dialects by route and by name, for the gateway and the neuron."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from cortex.wire.dialects import (
    anthropic_messages,
    llama_cpp_infill,
    openai_chat,
    openai_completions,
    openai_responses,
)
from cortex.wire.dialects.dialect import Dialect
from cortex.wire.dialects.ollama import chat as ollama_chat
from cortex.wire.dialects.ollama import generate as ollama_generate
from cortex.wire.dialects.openai_responses import compaction
from cortex.wire.error_encoding import OPENAI, Family

DIALECTS: Final[Mapping[str, Dialect]] = {
    module.DIALECT.name: module.DIALECT
    for module in (
        openai_chat,
        openai_completions,
        openai_responses,
        anthropic_messages,
        ollama_chat,
        ollama_generate,
        llama_cpp_infill,
        compaction,
    )
}

ROUTES: Final[Mapping[str, str]] = {dialect.path: name for name, dialect in DIALECTS.items()}
"""`POST` paths that generate, and the dialect of each."""

FAMILIES: Final = tuple(dict.fromkeys(dialect.family for dialect in DIALECTS.values()))
_OF_FUNCTIONS = {"tools": "functions", "tool_choice": "function_call"}


def client_field(dialect: str, name: str | None, *, as_functions: bool = False) -> str | None:
    """The client's name of the `GenerateRequest` field `name`. `as_functions`: as in the request."""
    names = _OF_FUNCTIONS if as_functions else DIALECTS[dialect].client_fields
    return names.get(name, name) if name is not None else None


def family(path: str, header: Callable[[bytes], bytes | None] | None = None) -> Family:
    """The family of clients that send requests to `path`. All of them list models, and use files and other paths that
    do not exist here: there the headers decide, which `header` reads."""
    for each in FAMILIES:
        if each.prefix is not None and path.startswith(each.prefix):
            return each
    if header is not None and path.startswith("/v1/") and path not in ROUTES:
        for each in FAMILIES:
            if each.header is not None and header(each.header) is not None:
                return each
    return OPENAI
