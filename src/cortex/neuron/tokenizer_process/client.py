"""A model's text whose encoder is a process of its own, started when it is needed and again when it has died."""

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
"""What reading a model's text files may end in."""


class TokenizerClient:
    """The daemon's side, a `TextEncoder`. What is async belongs to the loop it was made on, the rest to other threads.

    A process that dies under a request is replaced and asked again, once.
    """

    def __init__(self, model: Path) -> None:
        """Starts nothing yet."""
        self._model = model
        self._loop = asyncio.get_running_loop()
        self._loop_thread_id = threading.get_ident()
        self._starting = asyncio.Lock()
        self._process: TokenizerProcess | None = None
        self._fingerprint: str | None = None
        self._is_closed = False
        self._num_asking = 0
        self._asking_lock = threading.Lock()
        self._asked_s = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since it was last asked; 0 while it is."""
        return 0.0 if self._num_asking else time.monotonic() - self._asked_s

    async def read(self) -> TextModel:
        """The model's text. Raises what is in `UNREADABLE`, or Recovering."""
        return await asyncio.to_thread(self._read)

    async def wake(self) -> None:
        """Has the process started if it is not, without waiting for what it reads. Raises OSError or Recovering."""
        await self._started()

    async def rest(self) -> None:
        """Ends the process; whoever asks next has it started anew."""
        async with self._starting:
            process, self._process = self._process, None
            if process is not None:
                await process.stop()

    async def close(self) -> None:
        """Ends the process for good; who waits for an answer gets Recovering."""
        self._is_closed = True
        await self.rest()

    # The encoder

    def encode(self, text: str) -> list[int]:
        return unpacked(self._encoded(Encode(text)).ids)

    def encode_document(self, text: str) -> list[int]:
        return unpacked(self._encoded(EncodeDocument(text)).ids)

    def encode_segmented(self, text: str) -> Segmented:
        reply = self._ask_to_encode(EncodeSegmented(text))
        assert isinstance(reply, EncodedSegmented)
        return segmented_of(reply)

    def _encoded(self, request: Encode | EncodeDocument) -> Encoded:
        reply = self._ask_to_encode(request)
        assert isinstance(reply, Encoded)
        return reply

    def _ask_to_encode(self, request: Encode | EncodeDocument | EncodeSegmented) -> Reply:
        """Raises LoadFailed where a new process cannot read the files any more, or Recovering."""
        try:
            return self._ask(request)
        except UNREADABLE as error:
            raise LoadFailed(f"the tokenizer of {self._model.name} is gone: {error}") from error

    # Inside

    def _read(self) -> TextModel:
        reply = self._ask(Describe())
        assert isinstance(reply, Described)
        self._fingerprint = reply.fingerprint
        return TextModel.of(reply.facts, self)

    def _ask(self, request: Request) -> Reply:
        """Raises what the tokenizer process met, Recovering when it died twice."""
        assert threading.get_ident() != self._loop_thread_id, "another process is waited for: not on the event loop"
        with self._asking_lock:
            self._num_asking += 1
        try:
            return self._ask_twice(request)
        finally:
            with self._asking_lock:
                self._num_asking -= 1
                self._asked_s = time.monotonic()

    def _ask_twice(self, request: Request) -> Reply:
        for _ in range(2):
            process = self._process
            if process is None or process.is_gone:
                process = asyncio.run_coroutine_threadsafe(self._started(), self._loop).result()
            try:
                reply = process.ask(request)
            except TokenizerProcessLost as error:
                log.warning("the tokenizer process of %s was lost: %s", self._model, error)
                continue
            if isinstance(reply, EncodeFailed):
                raise error_of(reply)
            return reply
        raise Recovering(f"the tokenizer of {self._model.name} ended twice while it was at work; try again")

    async def _started(self) -> TokenizerProcess:
        """The process that runs, or a new one; on the loop. Raises OSError or Recovering."""
        async with self._starting:
            if self._is_closed:
                raise Recovering(f"the tokenizer of {self._model.name} was let go meanwhile; try again")
            if self._process is not None and not self._process.is_gone:
                return self._process
            if self._process is not None:
                await self._process.stop()
            self._process = await TokenizerProcess.start(self._model, self._fingerprint)
            return self._process
