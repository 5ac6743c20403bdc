"""Parses request bodies: small ones at once, large ones in another process."""

from __future__ import annotations

import asyncio

import msgspec

from cortex.ipc.channel import Unsendable
from cortex.ipc.pool import PoolLost, WorkerLost, WorkerPool
from cortex.parsing import protocol
from cortex.parsing.protocol import (
    Job,
    Parsed,
    ParsedText,
    ParseRequest,
    ParseTokenize,
    Renamed,
    RenameModel,
    Reply,
    TranslateRequest,
)
from cortex.wire.errors import BodyTooLarge, Overloaded, PreparationLimitExceeded
from cortex.wire.node import Dialect
from cortex.wire.packed_request import PackedRequest
from cortex.wire.rejection import Rejected, error_of
from cortex.wire.requests import GenerateRequest

LARGE_BYTES = 1 << 17
"""Smaller bodies take milliseconds, whatever they contain."""
_NUM_WORKERS = 2
_MAX_WAITING = 64
_TIMEOUT_S = 60.0
_MEMORY_BYTES = 1 << 30
"""A body of 64 MB of text takes less than this, in any script."""

_heads = msgspec.json.Decoder(GenerateRequest)


class BodyParser:
    """Belongs to one loop. Every method raises the CortexError of a body that is invalid, or too expensive to parse.

    Cancelling a call ends its work. The processes start with the first large body.
    """

    def __init__(self, memory_bytes: int = _MEMORY_BYTES) -> None:
        """`memory_bytes`: the most that parsing one body may allocate."""
        self._memory_bytes = memory_bytes
        self._pool: WorkerPool[Reply] | None = None
        self._starting = asyncio.Lock()
        self._places = asyncio.Semaphore(_NUM_WORKERS)
        self._num_jobs = 0

    async def parse(self, dialect: Dialect, body: bytes, *, strip_billing: bool = False) -> PackedRequest:
        """An inference request, without the billing line of the messages dialect if `strip_billing`."""
        return _packed(await self._run(ParseRequest(dialect, body, strip_billing), body))

    async def translate(self, dialect: Dialect, body: bytes, model: str) -> tuple[GenerateRequest, bytes]:
        """The head of an inference request, and the request for `model` in OpenAI chat."""
        translated = _packed(await self._run(TranslateRequest(dialect, body, model), body))
        return translated.head, translated.whole

    async def rename(self, body: bytes, model: str) -> bytes:
        """`body`, which must be a JSON object, with another model name."""
        reply = await self._run(RenameModel(body, model), body)
        assert isinstance(reply, Renamed)
        return reply.body

    async def parse_tokenize(self, body: bytes) -> PackedRequest | ParsedText:
        """A request for the tokens of a conversation or of a text."""
        reply = await self._run(ParseTokenize(body), body)
        return reply if isinstance(reply, ParsedText) else _packed(reply)

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.stop()

    async def _run(self, job: Job, body: bytes) -> Parsed | ParsedText | Renamed:
        if len(body) < LARGE_BYTES:
            return protocol.run(job)
        if self._num_jobs >= _NUM_WORKERS + _MAX_WAITING:
            raise Overloaded(f"{_MAX_WAITING} large requests are waiting to be parsed; try again.", retry_after_s=5)
        self._num_jobs += 1
        try:
            async with self._places, asyncio.timeout(_TIMEOUT_S):
                reply = await self._run_remotely(job)
        except TimeoutError:
            raise PreparationLimitExceeded(
                f"Parsing this request took longer than {_TIMEOUT_S:g} s; send a smaller or simpler body."
            ) from None
        except WorkerLost as error:
            raise PreparationLimitExceeded(
                "Parsing this request took too much memory; send a body with fewer arrays and objects."
            ) from error
        except Unsendable as error:
            raise BodyTooLarge(f"The body cannot be parsed: {error}.") from error
        finally:
            self._num_jobs -= 1
        if isinstance(reply, Rejected):
            raise error_of(reply)
        return reply

    async def _run_remotely(self, job: Job) -> Reply:
        """Raises WorkerLost, Unsendable, or Overloaded when the processes cannot run."""
        for _ in range(2):
            try:
                return await (await self._running_pool()).run(job, in_background=True)
            except PoolLost:
                continue
        raise Overloaded("The process that parses large requests ended twice; try again.", retry_after_s=1)

    async def _running_pool(self) -> WorkerPool[Reply]:
        async with self._starting:
            if self._pool is None or self._pool.has_ended:
                if self._pool is not None:
                    await self._pool.stop()
                try:
                    self._pool = await WorkerPool.start(
                        "cortex.parsing", *("--memory-bytes", str(self._memory_bytes)), reply_type=Reply
                    )
                except OSError as error:
                    raise Overloaded(f"Large requests cannot be parsed now: {error}; try again.") from error
            return self._pool


def _packed(reply: Parsed | ParsedText | Renamed) -> PackedRequest:
    assert isinstance(reply, Parsed)
    return PackedRequest(_heads.decode(reply.head), reply.body)
