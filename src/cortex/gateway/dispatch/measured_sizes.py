"""Measured sizes of models, kept across restarts: they place a model better than any estimate."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from cortex.wire.words import about, os_error_in_words

log = logging.getLogger(__name__)

FILE_NAME = "cortex-sizes.json"

Measured = Mapping[tuple[str, str | None, int | None], int]
"""Bytes by model id, quant and context, as `Fleet.measured` has them."""


class _MeasuredSize(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    quant: str | None = None
    context_tokens: int | None = None
    bytes: int


class MeasuredSizes:
    """The file of measured sizes. Reading and writing never raise: on failure they log, and estimates are used."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE_NAME
        self._written: Measured = {}
        self._failing = False

    def read(self) -> Measured:
        """The sizes in the file; empty when there is no readable one."""
        try:
            sizes = msgspec.json.decode(self._path.read_bytes(), type=list[_MeasuredSize])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as problem:
            reason = about(str(self._path), problem)
            log.warning("measured sizes not read, models are placed by estimates: %s", reason)
            return {}
        self._written = {(size.model, size.quant, size.context_tokens): size.bytes for size in sizes}
        return self._written

    def write(self, measured: Measured) -> None:
        """Write `measured` atomically. Does nothing when the file already holds it. Blocking."""
        if measured == self._written:
            return
        sizes = [
            _MeasuredSize(model=model, quant=quant, context_tokens=context, bytes=num_bytes)
            for (model, quant, context), num_bytes in sorted(measured.items(), key=repr)
        ]
        draft = self._path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(msgspec.json.format(msgspec.json.encode(sizes)) + b"\n")
            draft.replace(self._path)
        except OSError as problem:
            if not self._failing:
                reason = os_error_in_words(problem)
                log.warning("measured sizes not written: %s; set gateway.state to a writable directory", reason)
            self._failing = True
        else:
            self._written = dict(measured)
            self._failing = False
