"""Pictures of requests: their limits, and their pixels for a model."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from cortex.ipc.channel import Unsendable
from cortex.ipc.fair_queue import FairQueue, NoPlace
from cortex.ipc.helper import Function, Helper
from cortex.ipc.pool import CallLost, HelperPool, PoolLost
from cortex.neuron.picture_process.limits import PictureLimits
from cortex.neuron.pictures.picture import Picture, PictureGrid, PicturePlace, content_key
from cortex.neuron.pictures.spec import PictureSpec
from cortex.wire.errors import CortexError, Overloaded, PreparationLimitExceeded, RateLimitExceeded
from cortex.wire.packed_request import PackedRequest
from cortex.wire.pictures.header import num_jpeg_scans
from cortex.wire.pictures.parts import invalid

_MAX_OF_REQUEST = 2
"""Pictures of one request that are decoded at once: others get their turns between them."""
_MAX_WAITING = 1024
_MAX_WAITING_OF_CLIENT = 128
"""Pictures that wait to be decoded. A request has `_MAX_OF_REQUEST` among them."""
MAX_PIXEL_BYTES = 225_000_000
"""The pixels of one request: they are one message to the worker (`ipc.channel.MAX_FRAME_BYTES`). About seventy tiles
of a thousand pixels square."""

_PIXELS: Function[tuple[bytes, float]] = Function("pixels", tuple[bytes, float])


@dataclass(slots=True)
class PictureWork:
    """What the pictures of one request have taken so far, whatever becomes of it."""

    client: str
    """Who sent them: clients share the processes fairly."""
    num_tokens: int = 0
    """The tokens of pictures whose decoding has begun."""
    cpu_s: float = 0.0
    """How long decoding them has computed."""


class Pictures:
    """Decodes pictures and keeps those that were used last. Belongs to the daemon's loop.

    The process starts with the first picture. A picture that ends its worker fails alone; one whose process ends for
    another reason is decoded again. Cancelling a call ends its work.
    """

    def __init__(self, limits: PictureLimits) -> None:
        self.limits = limits
        self._pool = HelperPool(
            Helper(
                name="neuron-pictures",
                purpose="the process that decodes pictures",
                module="cortex.neuron.picture_process.decoding",
                memory_bytes=limits.memory_mb * 1_000_000,
                cpu_s=math.ceil(limits.timeout_s),
                # Threads of a library would not survive a fork.
                environment={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
        )
        self._queue = FairQueue(limits.workers, _MAX_WAITING, _MAX_WAITING_OF_CLIENT)
        self._known: OrderedDict[bytes, bytes] = OrderedDict()
        self._num_known_bytes = 0

    @property
    def process_id(self) -> int | None:
        """None while no process was started."""
        return self._pool.process_id

    async def prepare(
        self, request: PackedRequest, spec: PictureSpec, places: Sequence[PicturePlace], work: PictureWork
    ) -> tuple[Picture, ...]:
        """The pictures of a prompt; what they take is added to `work`. Raises a CortexError, which names the
        picture."""
        num_bytes = 0
        for place in places:
            num_bytes += place.grid.num_bytes
            if num_bytes > MAX_PIXEL_BYTES:
                size, most = num_bytes // 3_000_000, MAX_PIXEL_BYTES // 3_000_000
                raise invalid(
                    request.head.pictures[place.number].param,
                    f"the pictures up to here have {size} million pixels as the model takes them, at most {most} are "
                    "allowed in one request; send fewer, or with `detail` low",
                )
        turns = asyncio.Semaphore(_MAX_OF_REQUEST)

        async def one(place: PicturePlace) -> Picture:
            file, param = request.files[place.number], request.head.pictures[place.number].param
            async with turns:
                # Some milliseconds, in which the interpreter lock is not held.
                key = await asyncio.to_thread(content_key, file, place.grid, spec.digest, request.head.tenant)
                if (pixels := self._known.get(key)) is None:
                    pixels = await self._decode(file, param, spec, place.grid, work)
                self._keep(key, pixels)
            return Picture(place.at, place.grid, key, pixels)

        tasks = [asyncio.create_task(one(place)) for place in places]
        try:
            return tuple(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def rest_idle(self) -> None:
        """Ends the process if it was not used for a while."""
        await self._pool.rest_idle()

    async def close(self) -> None:
        await self._pool.close()

    def _keep(self, key: bytes, pixels: bytes) -> None:
        if key not in self._known:
            self._num_known_bytes += len(pixels)
        self._known[key] = pixels
        self._known.move_to_end(key)
        while self._num_known_bytes > self.limits.cache_mb * 1_000_000:
            _, oldest = self._known.popitem(last=False)
            self._num_known_bytes -= len(oldest)

    async def _decode(self, file: bytes, param: str, spec: PictureSpec, grid: PictureGrid, work: PictureWork) -> bytes:
        limits = self.limits
        if (num_scans := await asyncio.to_thread(num_jpeg_scans, file)) > limits.max_scans:
            raise invalid(
                param,
                f"the picture has {num_scans} scans, at most {limits.max_scans} are allowed (pictures.max_scans); save "
                "it again, not as a progressive JPEG",
            )
        try:
            async with self._queue.hold(work.client):
                if work.cpu_s >= limits.request_s:
                    raise _exceeded(
                        param,
                        f"follows others of this request that took {work.cpu_s:.0f} s (pictures.request_s); send fewer",
                    )
                work.num_tokens += grid.num_tokens
                pixels, cpu_s = await self._pool.call(_PIXELS, spec, grid, param, body=file, timeout_s=limits.timeout_s)
                work.cpu_s += cpu_s
                return pixels
        except NoPlace as full:
            raise _too_many(full) from None
        except TimeoutError:
            raise _exceeded(
                param, f"took longer than {limits.timeout_s:g} s (pictures.timeout_s); send a smaller one"
            ) from None
        except CallLost:
            taken = f"more than {limits.memory_mb} MB (pictures.memory_mb) or {limits.timeout_s:g} s (timeout_s)"
            raise _exceeded(param, f"took {taken}, or the file is damaged; send a smaller one") from None
        except Unsendable as error:
            raise invalid(param, str(error)) from error
        except PoolLost as error:
            raise Overloaded(f"Pictures cannot be decoded now: {error}; try again.", retry_after_s=1) from error


def _exceeded(param: str, problem: str) -> PreparationLimitExceeded:
    return PreparationLimitExceeded(f"Invalid value for '{param}': decoding the picture {problem}.", param=param)


def _too_many(full: NoPlace) -> CortexError:
    if full.is_own:
        return RateLimitExceeded(
            f"{full.num_waiting} of your pictures are waiting to be decoded; try again.", retry_after_s=5
        )
    return Overloaded(f"{full.num_waiting} pictures are waiting to be decoded; try again.", retry_after_s=5)
