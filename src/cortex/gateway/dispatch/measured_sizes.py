"""Measured sizes of models, kept across restarts: they place a model better than any estimate."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from cortex.wire.words import about, os_error_in_words

log = logging.getLogger(__name__)

FILE_NAME = "cortex-sizes.json"

Measured = Mapping[tuple[str, str | None, int | None], int]
"""Bytes by model id, quant and context, as `Fleet.measured` has them."""


MAX_AGE_S = 90 * 86400.0
"""A size that no new measurement has confirmed for this long is dropped: the model may have changed."""


class _MeasuredSize(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    quant: str | None = None
    context_tokens: int | None = None
    bytes: int
    at: float
    """When it was measured, in Unix time."""


class MeasuredSizes:
    """The file of measured sizes. Reading and writing never raise: on failure they log, and estimates are used."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = directory / FILE_NAME
        self._clock = clock
        self._written: Measured = {}
        self._at: dict[tuple[str, str | None, int | None], float] = {}
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
        now = self._clock()
        kept = [size for size in sizes if now - size.at < MAX_AGE_S]
        self._written = {(size.model, size.quant, size.context_tokens): size.bytes for size in kept}
        self._at = {(size.model, size.quant, size.context_tokens): size.at for size in kept}
        return self._written

    def write(self, measured: Measured) -> None:
        """Write `measured` atomically. Does nothing when the file already holds it. Blocking."""
        if measured == self._written:
            return
        now = self._clock()
        self._at = {
            key: self._at[key] if key in self._at and self._written.get(key) == num_bytes else now
            for key, num_bytes in measured.items()
        }
        sizes = [
            _MeasuredSize(model=model, quant=quant, context_tokens=context, bytes=num_bytes, at=self._at[key])
            for key, num_bytes in sorted(measured.items(), key=repr)
            for model, quant, context in [key]
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
