"""The files of pictures, apart from the conversation: what renders it needs only their sizes. Pure."""

from __future__ import annotations

import binascii
from collections.abc import Callable, Sequence

import msgspec

from cortex.wire.errors import InvalidValue
from cortex.wire.pictures.header import PictureHeader, UnreadablePicture, format_of, read_header
from cortex.wire.pictures.parts import invalid
from cortex.wire.requests import GenerateRequest, Message, Part, PicturePart, ToolResult

MAX_PICTURES = 1000
"""Limit per request, whatever the operator allows."""


def take_files(request: GenerateRequest) -> tuple[GenerateRequest, tuple[bytes, ...]]:
    """`request` without the files of its pictures but with their sizes, and the files. Raises InvalidValue for a
    picture that is only an address, and for a file that is no picture."""
    pictures: list[PicturePart] = []
    files: list[bytes] = []

    def take(picture: PicturePart) -> PicturePart:
        if len(pictures) == MAX_PICTURES:
            raise invalid(picture.param, f"more than {MAX_PICTURES} pictures in one request; send fewer")
        taken = _taken(picture, len(pictures))
        pictures.append(taken)
        files.append(picture.data)
        return taken

    changed = _with_pictures(request, take)
    return (msgspec.structs.replace(changed, pictures=tuple(pictures)), tuple(files)) if pictures else (request, ())


def with_files(request: GenerateRequest, files: Sequence[bytes]) -> GenerateRequest:
    """What `take_files` was given; it reverses it."""
    if not request.pictures:
        return request
    changed = _with_pictures(request, lambda picture: msgspec.structs.replace(picture, data=files[picture.number]))
    return msgspec.structs.replace(changed, pictures=())


def check_files(request: GenerateRequest) -> None:
    """Raises InvalidValue for a picture that is only an address, and for a file that is no picture."""
    for message in request.messages:
        for part in message.parts:
            for each in part.parts if isinstance(part, ToolResult) else (part,):
                if isinstance(each, PicturePart):
                    header_of(each)


def data_url(picture: PicturePart) -> str:
    """The file as a URL, with the type that it has rather than the declared one."""
    found = format_of(picture.data)
    media_type = f"image/{found}" if found is not None else picture.media_type or "application/octet-stream"
    return f"data:{media_type};base64,{binascii.b2a_base64(picture.data, newline=False).decode()}"


def header_of(picture: PicturePart) -> PictureHeader:
    """Raises InvalidValue for a picture that is only an address, and for a file that is no picture."""
    if picture.url:
        raise InvalidValue(
            f"Invalid value for '{picture.param}': pictures are not fetched from addresses here; send the picture "
            "itself, as a `data:` URL with base64. An operator can allow https addresses (`pictures.urls` in "
            "cortex.toml).",
            param=picture.param,
        )
    try:
        return read_header(picture.data)
    except UnreadablePicture as problem:
        raise invalid(picture.param, f"the picture cannot be read: {problem}") from None


def _taken(picture: PicturePart, number: int) -> PicturePart:
    header = header_of(picture)
    return PicturePart(
        detail=picture.detail,
        param=picture.param,
        number=number,
        num_bytes=len(picture.data),
        width=header.width,
        height=header.height,
    )


def _with_pictures(request: GenerateRequest, change: Callable[[PicturePart], PicturePart]) -> GenerateRequest:
    def changed_part(part: Part) -> Part:
        if isinstance(part, PicturePart):
            return change(part)
        if isinstance(part, ToolResult) and any(isinstance(each, PicturePart) for each in part.parts):
            parts = tuple(change(each) if isinstance(each, PicturePart) else each for each in part.parts)
            return msgspec.structs.replace(part, parts=parts)
        return part

    def changed_message(message: Message) -> Message:
        if not any(isinstance(part, PicturePart | ToolResult) for part in message.parts):
            return message
        return msgspec.structs.replace(message, parts=tuple(map(changed_part, message.parts)))

    return msgspec.structs.replace(request, messages=tuple(map(changed_message, request.messages)))
