"""Reads content blocks of the messages dialect into parts."""

from __future__ import annotations

from collections.abc import Iterator

from cortex.wire.errors import UnsupportedModality, shorten
from cortex.wire.fields.body import Fields
from cortex.wire.fields.tools import read_arguments
from cortex.wire.pictures.parts import from_base64, from_url
from cortex.wire.requests import Image, Part, Reasoning, Text, ToolCall, ToolResult


def read_blocks(fields: Fields) -> Iterator[Part]:
    """The parts of a turn's `content`. Raises `InvalidValue` for a block of an unknown type: the model would not see
    it."""
    content = fields.raw("content")
    if isinstance(content, str):
        if content:
            yield Text(text=content)
        return
    for block in fields.objects("content"):
        match block.text("type"):
            case "tool_use":
                yield ToolCall(
                    id=block.required_text("id"),
                    name=block.required_text("name"),
                    arguments=read_arguments(block, "input"),
                )
            case "tool_result":
                yield ToolResult(
                    call_id=block.required_text("tool_use_id"),
                    parts=tuple(_read_result(block)),
                    is_error=block.flag("is_error") or False,
                )
            case "thinking":
                yield Reasoning(text=block.text("thinking") or "", signature=block.text("signature"))
            case "redacted_thinking":
                pass  # encrypted for the vendor's models
            case _:
                yield from _read_text_or_image(block)


def block_pictures(fields: Fields) -> Iterator[str]:
    """The pictures that `read_blocks` finds in `content`, in base64 or as URLs, unchecked."""
    if not isinstance(fields.raw("content"), list):
        return
    for block in fields.objects("content"):
        kind, source = block.text("type"), block.raw("source")
        if kind == "image" and isinstance(source, dict):
            name = "data" if source.get("type") == "base64" else "url"
            yield Fields(source, block.param("source")).required_text(name)
        elif kind in ("tool_result", "search_result"):
            yield from block_pictures(block)
        elif kind == "document" and isinstance(source, dict) and source.get("type") == "content":
            yield from block_pictures(Fields(source, block.param("source")))


def read_text_blocks(fields: Fields, name: str) -> Iterator[Text]:
    """The blocks of a system prompt, which hold text only."""
    for block in fields.objects(name):
        yield Text(text=block.required_text("text"))


def _read_result(fields: Fields) -> Iterator[Text | Image]:
    content = fields.raw("content")
    if isinstance(content, str):
        yield Text(text=content)
        return
    for block in fields.objects("content"):
        yield from _read_text_or_image(block)


def _read_text_or_image(block: Fields) -> Iterator[Text | Image]:
    kind = block.text("type")
    match kind:
        case "image":
            yield _read_image(block)
        case "document":
            yield from _read_document(block)
        case "search_result":
            yield Text(text=f"{block.text('title') or ''}\n{block.text('source') or ''}")
            yield from _read_result(block)
        case _ if block.raw("text") is not None:
            yield Text(text=block.required_text("text"))
        case _:
            raise block.invalid("type", f"blocks of type '{shorten(kind or '')}' are not supported; remove the block")


def _read_image(block: Fields) -> Image:
    source = block.object("source")
    if source is None:
        raise block.invalid("source", "an image block needs one")
    match source.text("type"):
        case "base64":
            return from_base64(source.required_text("data"), source.text("media_type") or "", block.path)
        case "url":
            return from_url(source.required_text("url"), block.path)
        case "file":
            raise source.invalid("type", "no files are stored here; send the image as base64")
        case other:
            raise source.invalid("type", f"'{shorten(other or '')}' is not known; send the image as base64 or url")


def _read_document(block: Fields) -> Iterator[Text | Image]:
    """Only plain text documents are supported. Raises `UnsupportedModality` for others, such as PDF."""
    source = block.object("source")
    if source is not None and source.text("type") == "text":
        yield Text(text=source.required_text("data"))
    elif source is not None and source.text("type") == "content":
        yield from _read_result(source)
    else:
        raise UnsupportedModality(
            "The models here cannot read documents of this kind; send their text.", param=block.param("source")
        )
