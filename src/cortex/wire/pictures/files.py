"""The files of pictures, apart from the conversation: what renders it needs only their sizes. Pure."""

from __future__ import annotations

import binascii
from collections.abc import Callable, Sequence

import msgspec

from cortex.wire.errors import InvalidValue
from cortex.wire.pictures.header import PictureHeader, UnreadablePicture, format_of, read_header
from cortex.wire.pictures.parts import invalid
from cortex.wire.requests import GenerateRequest, Image, Message, Part, ToolResult

MAX_PICTURES = 1000
"""In one request, whatever an operator allows."""


def take_files(request: GenerateRequest) -> tuple[GenerateRequest, tuple[bytes, ...]]:
    """`request` without the files of its pictures but with their sizes, and the files. Raises InvalidValue for a
    picture that is only an address, and for a file that is no picture."""
    images: list[Image] = []
    files: list[bytes] = []

    def take(image: Image) -> Image:
        if len(images) == MAX_PICTURES:
            raise invalid(image.param, f"more than {MAX_PICTURES} pictures in one request; send fewer")
        taken = _taken(image, len(images))
        images.append(taken)
        files.append(image.data)
        return taken

    changed = _with_images(request, take)
    return (msgspec.structs.replace(changed, images=tuple(images)), tuple(files)) if images else (request, ())


def with_files(request: GenerateRequest, files: Sequence[bytes]) -> GenerateRequest:
    """What `take_files` was given; it reverses it."""
    if not request.images:
        return request
    changed = _with_images(request, lambda image: msgspec.structs.replace(image, data=files[image.number]))
    return msgspec.structs.replace(changed, images=())


def check_files(request: GenerateRequest) -> None:
    """Raises InvalidValue for a picture that is only an address, and for a file that is no picture."""
    for message in request.messages:
        for part in message.parts:
            for each in part.parts if isinstance(part, ToolResult) else (part,):
                if isinstance(each, Image):
                    header_of(each)


def data_url(image: Image) -> str:
    """The file as a URL, with the type that it has rather than the declared one."""
    found = format_of(image.data)
    media_type = f"image/{found}" if found is not None else image.media_type or "application/octet-stream"
    return f"data:{media_type};base64,{binascii.b2a_base64(image.data, newline=False).decode()}"


def header_of(image: Image) -> PictureHeader:
    """Raises InvalidValue for a picture that is only an address, and for a file that is no picture."""
    if image.url:
        raise InvalidValue(
            f"Invalid value for '{image.param}': pictures are not fetched from addresses here; send the picture "
            "itself, as a `data:` URL with base64. An operator can allow https addresses (`pictures.urls` in "
            "cortex.toml).",
            param=image.param,
        )
    try:
        return read_header(image.data)
    except UnreadablePicture as problem:
        raise invalid(image.param, f"the picture cannot be read: {problem}") from None


def _taken(image: Image, number: int) -> Image:
    header = header_of(image)
    return Image(
        detail=image.detail,
        param=image.param,
        number=number,
        num_bytes=len(image.data),
        width=header.width,
        height=header.height,
    )


def _with_images(request: GenerateRequest, change: Callable[[Image], Image]) -> GenerateRequest:
    def changed_part(part: Part) -> Part:
        if isinstance(part, Image):
            return change(part)
        if isinstance(part, ToolResult) and any(isinstance(each, Image) for each in part.parts):
            parts = tuple(change(each) if isinstance(each, Image) else each for each in part.parts)
            return msgspec.structs.replace(part, parts=parts)
        return part

    def changed_message(message: Message) -> Message:
        if not any(isinstance(part, Image | ToolResult) for part in message.parts):
            return message
        return msgspec.structs.replace(message, parts=tuple(map(changed_part, message.parts)))

    return msgspec.structs.replace(request, messages=tuple(map(changed_message, request.messages)))
