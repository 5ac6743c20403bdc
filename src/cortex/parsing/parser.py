"""Parses request bodies: small ones at once, large ones in another process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from cortex.foreign.body import ServerBody
from cortex.ipc.channel import Unsendable
from cortex.ipc.fair_queue import FairQueue, NoPlace
from cortex.ipc.helper import Helper, function_of
from cortex.ipc.pool import CallLost, HelperPool, PoolLost
from cortex.parsing import functions
from cortex.parsing.conversations import Completed, Completion, Joined, join, list_items
from cortex.parsing.cost import LARGE_BYTES, is_parsed_elsewhere
from cortex.parsing.envelope import RelayedBody, envelope_of
from cortex.parsing.functions import Parsed, ParsedText
from cortex.parsing.items import StoredTexts
from cortex.wire.errors import BodyTooLarge, Overloaded, PreparationLimitExceeded, RateLimitExceeded
from cortex.wire.packed_request import PackedRequest
from cortex.wire.preset import Preset
from cortex.wire.requests import GenerateRequest

T = TypeVar("T")

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
        self._pool = HelperPool(
            Helper(
                name="cortex-parse",
                purpose="the process that parses large requests",
                module="cortex.parsing.functions",
                memory_bytes=memory_bytes,
            )
        )
        self._queue = FairQueue(_NUM_WORKERS, _MAX_WAITING, max_waiting_per_client)

    async def run(self, function: Callable[..., T], *arguments: Any, body: bytes, client: str) -> T:
        """What one of `functions` returns: at once, or from another process if `body` is large."""
        if not is_parsed_elsewhere(body):
            return function(*arguments, body)
        return await self._call(function, *arguments, body=body, client=client)

    async def parse(
        self,
        dialect: str,
        body: bytes,
        client: str,
        *,
        tenant: bytes = b"",
        strip_billing: bool = False,
        generates: bool = True,
    ) -> PackedRequest:
        """An inference request, without its billing line if `strip_billing`. Without `generates` it may lack what only
        a response needs. `tenant`: as the client's gateway names it."""
        arguments = dialect, strip_billing, generates, tenant
        return _packed(await self.run(functions.parse_request, *arguments, body=body, client=client))

    async def translate(
        self, dialect: str, body: bytes, model: str, client: str, *, tenant: bytes = b""
    ) -> tuple[GenerateRequest, ServerBody]:
        """The head of an inference request, and the request for `model` in OpenAI chat, without a limit of tokens and
        with `tenant` as its salt if that is given."""
        parsed = await self.run(functions.translate_request, dialect, model, tenant, body=body, client=client)
        translated = _packed(parsed)
        return translated.head, ServerBody(translated.rest)

    async def read_relayed(
        self, dialect: str, body: bytes, client: str, *, generates: bool, strip_billing: bool
    ) -> RelayedBody:
        """A body that is relayed, read in another process."""
        reply = await self._call(functions.read_relayed, dialect, generates, strip_billing, body=body, client=client)
        found = body if reply.changed is None else reply.changed
        return RelayedBody(found, envelope_of(found, reply.summary, reply.spans), reply.is_stripped)

    async def read_preset(
        self, dialect: str, body: bytes, client: str, *, generates: bool, is_opaque: bool, preset: Preset
    ) -> RelayedBody:
        """A body that was read before, with what the model's name adds to it."""
        fields = {name: getattr(preset, name) for name in Preset.__struct_fields__}
        arguments = dialect, generates, is_opaque, msgspec.json.encode(fields)
        reply = await self._call(functions.read_preset, *arguments, body=body, client=client)
        return RelayedBody(reply.changed or body, envelope_of(reply.changed or body, reply.summary, reply.spans), False)

    async def parse_tokenize(self, body: bytes, client: str, tenant: bytes = b"") -> PackedRequest | ParsedText:
        """A request for the tokens of a conversation or of a text. `tenant`: as in `parse`."""
        reply = await self.run(functions.parse_tokenize, tenant, body=body, client=client)
        return reply if isinstance(reply, ParsedText) else _packed(reply)

    async def inline_pictures(self, body: bytes, files: Mapping[str, bytes], client: str) -> bytes:
        """`body` with files in place of their addresses."""
        data = b"".join((body, *files.values()))
        sizes = tuple(map(len, files.values()))
        return await self.run(functions.inline_pictures, tuple(files), sizes, body=data, client=client)

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
        arguments = completion, len(earlier), sizes
        reply = await self.run(functions.complete_conversation, *arguments, body=data, client=client)
        envelope = envelope_of(reply.body, reply.summary, reply.spans)
        return Completed(RelayedBody(reply.body, envelope, False), reply.stored_input)

    async def list_items(
        self, chain: Sequence[StoredTexts], client: str, *, limit: int, ascending: bool, after: str | None
    ) -> bytes:
        """A page of the conversation that the last response of `chain` was made from, as JSON."""
        data, sizes = await _joined(b"", chain)
        return await self.run(list_items, limit, ascending, after, sizes, body=data, client=client)

    async def close(self) -> None:
        await self._pool.close()

    async def _call(self, function: Callable[..., T], *arguments: Any, body: bytes, client: str) -> T:
        try:
            async with self._queue.hold(client):
                return await self._pool.call(
                    function_of(function), *arguments, body=body, timeout_s=_TIMEOUT_S, in_background=True
                )
        except NoPlace as full:
            problem = f"{full.num_waiting} large requests are waiting to be parsed; try again."
            if full.is_own:
                raise RateLimitExceeded(f"Of yours, {problem}", retry_after_s=5) from None
            raise Overloaded(problem, retry_after_s=5) from None
        except TimeoutError:
            raise PreparationLimitExceeded(
                f"Parsing this request took longer than {_TIMEOUT_S:g} s; send a smaller or simpler body."
            ) from None
        except CallLost as error:
            raise PreparationLimitExceeded(
                "Parsing this request took too much memory; send a body with fewer arrays and objects."
            ) from error
        except Unsendable as error:
            raise BodyTooLarge(f"The body cannot be parsed: {error}.") from error
        except PoolLost as error:
            raise Overloaded(f"Large requests cannot be parsed now: {error}; try again.", retry_after_s=1) from error


async def _joined(body: bytes, stored: Sequence[StoredTexts]) -> Joined:
    """On a thread where it is much: copying does not hold the interpreter lock for long."""
    num_bytes = len(body) + sum(len(response.input) + len(response.body) for response in stored)
    if num_bytes < LARGE_BYTES or not stored:
        return join(body, stored)
    return await asyncio.to_thread(join, body, stored)


def _packed(parsed: Parsed) -> PackedRequest:
    return PackedRequest(_heads.decode(parsed.head), parsed.body, parsed.files, parsed.token_prompts)
