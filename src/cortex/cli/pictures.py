"""Pictures on the command line: files that are sent with a prompt."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cortex.cli.failures import CommandError, ExitCode
from cortex.wire.pictures.header import UnreadablePicture, read_header

Content = str | list[dict[str, Any]]


def read_picture(path: Path) -> dict[str, Any]:
    """The part of a message with the picture at `path`. Raises CommandError for a file that is none."""
    try:
        file = path.expanduser().read_bytes()
        header = read_header(file)
    except OSError as error:
        raise CommandError(
            f"cannot read {path}: {error.strerror}", "check the path of the picture", ExitCode.USAGE
        ) from error
    except UnreadablePicture as problem:
        raise CommandError(f"{path} is no picture that can be sent: {problem}", "", ExitCode.USAGE) from None
    url = f"data:{header.media_type};base64,{base64.b64encode(file).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def content(text: str, pictures: Sequence[dict[str, Any]]) -> Content:
    """The content of a message: pictures first, as models are trained."""
    return [*pictures, {"type": "text", "text": text}] if pictures else text
