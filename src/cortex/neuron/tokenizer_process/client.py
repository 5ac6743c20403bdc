"""A model's tokenizer in its own process, which is started on first use and again when it has died."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from pathlib import Path

from cortex.neuron.text.errors import TextModelError
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.tokenizer.encoder import Segmented
from cortex.neuron.tokenizer_process.process import TokenizerProcess, TokenizerProcessLost
from cortex.neuron.tokenizer_process.protocol import (
    Describe,
    Described,
    Encode,
    Encoded,
    EncodeDocument,
    EncodedSegmented,
    EncodeFailed,
    EncodeSegmented,
    Reply,
    Request,
    error_of,
    segmented_of,
    unpacked,
)
from cortex.neuron.weights.errors import CheckpointError
from cortex.wire.errors import LoadFailed, Recovering

log = logging.getLogger(__name__)

UNREADABLE = (OSError, TextModelError, CheckpointError)
"""The errors that reading a model's text files may raise."""


class TokenizerClient:
    """The daemon's side of a tokenizer process, a `TextEncoder`.

    The async methods belong to the loop that created the client. The others block and must run on other threads.
    A request whose process dies is sent once more, to a new process.
    """

    def __init__(self, model: Path) -> None:
        """Does not start the process."""
        self._model = model
        self._loop = asyncio.get_running_loop()
        self._loop_thread_id = threading.get_ident()
        self._starting = asyncio.Lock()
        self._process: TokenizerProcess | None = None
        self._fingerprint: str | None = None
        self._is_closed = False
        self._num_calls = 0
        self._num_calls_lock = threading.Lock()
        self._last_call_s = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since the last call ended; 0 during a call."""
        return 0.0 if self._num_calls else time.monotonic() - self._last_call_s

    @property
    def process_id(self) -> int | None:
        """None while no process was started."""
        return self._process.process_id if self._process is not None else None

    async def read(self) -> TextModel:
        """The model's text. Raises the errors in `UNREADABLE`, or Recovering."""
        return await asyncio.to_thread(self._read)

    async def wake(self) -> None:
        """Starts the process unless it runs, without waiting until it is ready. Raises OSError or Recovering."""
        await self._running_process()

    async def rest(self) -> None:
        """Ends the process; the next call starts a new one."""
        async with self._starting:
            process, self._process = self._process, None
            if process is not None:
                await process.stop()

    async def close(self) -> None:
        """Ends the process for good; running and later calls raise Recovering."""
        self._is_closed = True
        await self.rest()

    # The encoder

    def encode(self, text: str) -> list[int]:
        return unpacked(self._encoded(Encode(text)).ids)

    def encode_document(self, text: str) -> list[int]:
        return unpacked(self._encoded(EncodeDocument(text)).ids)

    def encode_segmented(self, text: str) -> Segmented:
        reply = self._call_encoder(EncodeSegmented(text))
        assert isinstance(reply, EncodedSegmented)
        return segmented_of(reply)

    def _encoded(self, request: Encode | EncodeDocument) -> Encoded:
        reply = self._call_encoder(request)
        assert isinstance(reply, Encoded)
        return reply

    def _call_encoder(self, request: Encode | EncodeDocument | EncodeSegmented) -> Reply:
        """Raises LoadFailed when a new process can no longer read the files, or Recovering."""
        try:
            return self._call(request)
        except UNREADABLE as error:
            raise LoadFailed(f"the tokenizer of {self._model.name} can no longer be read: {error}") from error

    # Calls

    def _read(self) -> TextModel:
        reply = self._call(Describe())
        assert isinstance(reply, Described)
        self._fingerprint = reply.fingerprint
        return TextModel.of(reply.facts, self)

    def _call(self, request: Request) -> Reply:
        """Raises the error that the tokenizer process replied with, or Recovering when it died twice."""
        assert threading.get_ident() != self._loop_thread_id, "this blocks: it must not run on the event loop"
        with self._num_calls_lock:
            self._num_calls += 1
        try:
            return self._call_with_retry(request)
        finally:
            with self._num_calls_lock:
                self._num_calls -= 1
                self._last_call_s = time.monotonic()

    def _call_with_retry(self, request: Request) -> Reply:
        for _ in range(2):
            process = self._process
            if process is None or process.has_ended:
                process = asyncio.run_coroutine_threadsafe(self._running_process(), self._loop).result()
            try:
                reply = process.call(request)
            except TokenizerProcessLost as error:
                log.warning("lost the tokenizer process of %s: %s", self._model, error)
                continue
            if isinstance(reply, EncodeFailed):
                raise error_of(reply)
            return reply
        raise Recovering(f"the tokenizer process of {self._model.name} died twice during this request; try again")

    async def _running_process(self) -> TokenizerProcess:
        """The process, started if necessary; on the loop. Raises OSError or Recovering."""
        async with self._starting:
            if self._is_closed:
                raise Recovering(f"the tokenizer of {self._model.name} was closed; try again")
            if self._process is not None and not self._process.has_ended:
                return self._process
            if self._process is not None:
                await self._process.stop()
            self._process = await TokenizerProcess.start(self._model, self._fingerprint)
            return self._process
