"""The one error of this package. Its text is one line, made to be printed to the operator as it is."""

from __future__ import annotations

from pathlib import Path


class SettingsError(Exception):
    """A configuration that cannot be used.

    `key` is the dotted key (`neurons[1].endpoint`), `file` and `line` where it stands, `variable` the
    environment variable it came from; each is `None` where it does not apply.
    """

    def __init__(
        self,
        message: str,
        *,
        key: str | None = None,
        file: Path | None = None,
        line: int | None = None,
        variable: str | None = None,
    ) -> None:
        self.message = " ".join(message.splitlines())
        super().__init__(self.message)
        self.key = key
        self.file = file
        self.line = line
        self.variable = variable
