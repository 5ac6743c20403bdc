"""Parses request bodies: small ones at once, large ones in another process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import msgspec

from cortex.foreign.body import Access, ServerBody
from cortex.ipc.channel import Unsendable
from cortex.ipc.pool import JobLost, PoolLost, RestartedPool, WorkerPool
from cortex.parsing import protocol
from cortex.parsing.conversations import Completed, Completion, Joined, References, join
from cortex.parsing.cost import LARGE_BYTES, is_edited_elsewhere, is_parsed_elsewhere
from cortex.parsing.fair_queue import FairQueue, NoPlace
from cortex.parsing.items import StoredTexts
from cortex.parsing.picture_urls import PictureUrl
from cortex.parsing.protocol import Job, Reply, Result
from cortex.parsing.relayed import RelayedBody, envelope_of
from cortex.wire.errors import BodyTooLarge, Overloaded, PreparationLimitExceeded, RateLimitExceeded
from cortex.wire.node.protocol import Dialect
from cortex.wire.packed_request import PackedRequest
from cortex.wire.pooling.request import PoolingRequest
from cortex.wire.rejection import Rejected, error_of
from cortex.wire.requests import GenerateRequest

_NUM_WORKERS = 3
_MAX_WAITING = 1024
_MAX_WAITING_PER_CLIENT = 512
"""A burst of long prompts, of an agent or of all clients of an open gateway, is no flood: each takes milliseconds. A
gateway's `max_buffered_mb` bounds what the waiting bodies take."""
_TIMEOUT_S = 60.0
_MEMORY_BYTES = 1 << 30
"""A body of 64 MB of text takes less than this, in any script."""

_heads = msgspec.json.Decoder(GenerateRequest)


class BodyParser:
    """Belongs to one loop. Every method raises the CortexError of a body that is invalid, or too expensive to parse.

    `client` is who sends a body: clients share the processes fairly. Cancelling a call ends its work. The processes
    start with the first large body.
    """

    def __init__(
        self, memory_bytes: int = _MEMORY_BYTES, *, max_waiting_per_client: int = _MAX_WAITING_PER_CLIENT
    ) -> None:
        """`memory_bytes`: the most that parsing one body may allocate."""
        arguments = ("--memory-bytes", str(memory_bytes))
        self._pool: RestartedPool[Reply] = RestartedPool(
            "the process that parses large requests",
            lambda: WorkerPool.start("cortex.parsing", *arguments, reply_type=Reply),
        )
        self._queue = FairQueue(_NUM_WORKERS, _MAX_WAITING, max_waiting_per_client)

    async def parse(
        self,
        dialect: Dialect,
        body: bytes,
        client: str,
        *,
        tenant: bytes = b"",
        strip_billing: bool = False,
        generates: bool = True,
    ) -> PackedRequest:
        """An inference request, without its billing line if `strip_billing`. Without `generates` it may lack what only
        a response needs. `tenant`: as the client's gateway names it."""
        job = protocol.ParseRequest(dialect, strip_billing, generates, tenant, body)
        return _packed(await self._run(job, client, is_parsed_elsewhere(body)))

    async def translate(
        self, dialect: Dialect, body: bytes, model: str, client: str, *, tenant: bytes = b""
    ) -> tuple[GenerateRequest, ServerBody]:
        """The head of an inference request, and the request for `model` in OpenAI chat, without a limit of tokens and
        with `tenant` as its salt if that is given."""
        job = protocol.TranslateRequest(dialect, model, tenant, body)
        translated = _packed(await self._run(job, client, is_parsed_elsewhere(body)))
        return translated.head, ServerBody(translated.rest)

    async def edit(
        self, body: bytes, values: dict[str, str | int], client: str, *, without: tuple[str, ...] = ()
    ) -> bytes:
        """`body`, which must be a JSON object, with other values for some fields and without others."""
        reply = await self._run(protocol.EditFields(values, without, body), client, is_edited_elsewhere(body))
        assert isinstance(reply, protocol.Edited)
        return reply.body

    async def server_body(
        self, path: str, body: bytes, client: str, *, without: tuple[str, ...], access: Access = "any"
    ) -> ServerBody:
        """A body for a server that is not ours, of a request to `path`."""
        job = protocol.WriteServerBody(path, without, access, body)
        reply = await self._run(job, client, is_parsed_elsewhere(body))
        assert isinstance(reply, ServerBody)
        return reply

    async def read_relayed(
        self, dialect: Dialect, body: bytes, client: str, *, generates: bool, strip_billing: bool
    ) -> RelayedBody:
        """A body that is relayed, read in another process."""
        reply = await self._run(protocol.ReadRelayed(dialect, generates, strip_billing, body), client, True)
        assert isinstance(reply, protocol.ReadRelayedBody)
        found = body if reply.changed is None else reply.changed
        return RelayedBody(found, envelope_of(found, reply.facts, reply.spans), reply.is_stripped)

    async def translate_embed(self, body: bytes, model: str | None, client: str) -> bytes:
        """The body for `/v1/embeddings` of a request of Ollama's embedding routes."""
        reply = await self._run(protocol.TranslateEmbed(model, body), client, is_parsed_elsewhere(body))
        assert isinstance(reply, protocol.Edited)
        return reply.body

    async def parse_tokenize(
        self, body: bytes, client: str, tenant: bytes = b""
    ) -> PackedRequest | protocol.ParsedText:
        """A request for the tokens of a conversation or of a text. `tenant`: as in `parse`."""
        reply = await self._run(protocol.ParseTokenize(tenant, body), client, is_parsed_elsewhere(body))
        return reply if isinstance(reply, protocol.ParsedText) else _packed(reply)

    async def parse_pooling(self, path: str, body: bytes, client: str) -> PoolingRequest:
        """A request for vectors or scores of the route `path`."""
        reply = await self._run(protocol.ParsePooling(path, body), client, is_parsed_elsewhere(body))
        assert isinstance(reply, protocol.ParsedPooling)
        return reply.request

    async def find_picture_urls(self, body: bytes, client: str) -> tuple[PictureUrl, ...]:
        """The pictures of a request that are addresses."""
        reply = await self._run(protocol.FindPictureUrls(body), client, is_parsed_elsewhere(body))
        assert isinstance(reply, protocol.FoundPictureUrls)
        return reply.found

    async def inline_pictures(self, body: bytes, files: Mapping[str, bytes], client: str) -> bytes:
        """`body` with files in place of their addresses."""
        data = b"".join((body, *files.values()))
        job = protocol.InlinePictures(tuple(files), tuple(map(len, files.values())), data)
        reply = await self._run(job, client, is_parsed_elsewhere(data))
        assert isinstance(reply, protocol.Edited)
        return reply.body

    async def find_references(self, body: bytes, client: str, *, generates: bool) -> References:
        """What the items of a request of the Responses API refer to."""
        reply = await self._run(protocol.FindReferences(generates, body), client, is_parsed_elsewhere(body))
        assert isinstance(reply, protocol.FoundReferences)
        return References(reply.are_any, reply.response_ids)

    async def complete(
        self,
        body: bytes,
        earlier: Sequence[StoredTexts],
        referred: Sequence[StoredTexts],
        completion: Completion,
        client: str,
    ) -> Completed:
        """A request of the Responses API with the responses that it continues and the items that it refers to."""
        data, sizes = await _joined(body, (*earlier, *referred))
        job = protocol.CompleteConversation(completion, len(earlier), sizes, data)
        reply = await self._run(job, client, is_parsed_elsewhere(data))
        assert isinstance(reply, protocol.CompletedBody)
        envelope = envelope_of(reply.body, reply.facts, reply.spans)
        return Completed(RelayedBody(reply.body, envelope, False), reply.stored_input)

    async def list_items(
        self, chain: Sequence[StoredTexts], client: str, *, limit: int, ascending: bool, after: str | None
    ) -> bytes:
        """A page of the conversation that the last response of `chain` was made from, as JSON."""
        data, sizes = await _joined(b"", chain)
        reply = await self._run(
            protocol.ListItems(limit, ascending, after, sizes, data), client, is_parsed_elsewhere(data)
        )
        assert isinstance(reply, protocol.ListedItems)
        return reply.body

    async def close(self) -> None:
        await self._pool.close()

    async def _run(self, job: Job, client: str, is_expensive: bool) -> Result:
        if not is_expensive:
            return protocol.run(job)
        try:
            async with self._place(client), asyncio.timeout(_TIMEOUT_S):
                without_body = msgspec.structs.replace(job, body=b"")
                reply = await self._pool.run(without_body, job.body, in_background=True)
        except TimeoutError:
            raise PreparationLimitExceeded(
                f"Parsing this request took longer than {_TIMEOUT_S:g} s; send a smaller or simpler body."
            ) from None
        except JobLost as error:
            raise PreparationLimitExceeded(
                "Parsing this request took too much memory; send a body with fewer arrays and objects."
            ) from error
        except Unsendable as error:
            raise BodyTooLarge(f"The body cannot be parsed: {error}.") from error
        except (PoolLost, OSError) as error:
            raise Overloaded(f"Large requests cannot be parsed now: {error}; try again.", retry_after_s=1) from error
        if isinstance(reply, Rejected):
            raise error_of(reply)
        return reply

    @asynccontextmanager
    async def _place(self, client: str) -> AsyncIterator[None]:
        """Waits for a place and holds it. Raises Overloaded, or RateLimitExceeded for a client that sends too many."""
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def start() -> None:
            if not started.done():
                started.set_result(None)

        try:
            entry = self._queue.enter(client, start)
        except NoPlace as full:
            problem = f"{full.num_waiting} large requests are waiting to be parsed; try again."
            raise (
                RateLimitExceeded(f"Of yours, {problem}", retry_after_s=5)
                if full.is_own
                else Overloaded(problem, retry_after_s=5)
            ) from None
        try:
            await started
            yield
        finally:
            self._queue.leave(entry)


async def _joined(body: bytes, stored: Sequence[StoredTexts]) -> Joined:
    """On a thread where it is much: copying does not hold the interpreter lock for long."""
    num_bytes = len(body) + sum(len(response.input) + len(response.body) for response in stored)
    if num_bytes < LARGE_BYTES or not stored:
        return join(body, stored)
    return await asyncio.to_thread(join, body, stored)


def _packed(reply: Result) -> PackedRequest:
    assert isinstance(reply, protocol.Parsed)
    return PackedRequest(_heads.decode(reply.head), reply.body, reply.files, reply.token_prompts)
