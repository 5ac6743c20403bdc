"""Pictures of requests: their limits, and their pixels for a model."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Sequence

from cortex.ipc.channel import Unsendable
from cortex.ipc.pool import JobLost, PoolLost, RestartedPool, WorkerPool
from cortex.neuron.picture_process.limits import PictureLimits
from cortex.neuron.picture_process.protocol import Decode, Decoded, Reply
from cortex.neuron.vision.picture import Picture, PictureGrid, PicturePlace, content_key
from cortex.neuron.vision.spec import PictureSpec
from cortex.wire.errors import Overloaded, PreparationLimitExceeded
from cortex.wire.packed_request import PackedRequest
from cortex.wire.pictures.parts import invalid
from cortex.wire.rejection import Rejected, error_of

_MAX_OF_REQUEST = 2
"""Pictures of one request that are decoded at once: others get their turns between them."""
_REST_AFTER_S = 60.0
MAX_PIXEL_BYTES = 225_000_000
"""The pixels of one request: they are one message to the worker (`ipc.channel.MAX_FRAME_BYTES`). About seventy tiles
of a thousand pixels square."""


class Pictures:
    """Decodes pictures and keeps those that were used last. Belongs to the daemon's loop.

    The process starts with the first picture. A picture that ends its worker fails alone; one whose process ends for
    another reason is decoded again. Cancelling a call ends its work.
    """

    def __init__(self, limits: PictureLimits) -> None:
        self.limits = limits
        self._pool: RestartedPool[Reply] = RestartedPool("the process that decodes pictures", self._start)
        self._turns = asyncio.Semaphore(limits.workers)
        self._known: OrderedDict[bytes, bytes] = OrderedDict()
        self._num_known_bytes = 0
        self._num_jobs = 0
        self._last_job_s = time.monotonic()

    @property
    def process_id(self) -> int | None:
        """None while no process was started."""
        return self._pool.process_id

    async def prepare(
        self, request: PackedRequest, spec: PictureSpec, places: Sequence[PicturePlace]
    ) -> tuple[Picture, ...]:
        """The pictures of a prompt. Raises a CortexError, which names the picture."""
        num_bytes = 0
        for place in places:
            num_bytes += place.grid.num_bytes
            if num_bytes > MAX_PIXEL_BYTES:
                size, most = num_bytes // 3_000_000, MAX_PIXEL_BYTES // 3_000_000
                raise invalid(
                    request.head.images[place.number].param,
                    f"the pictures up to here have {size} million pixels as the model takes them, at most {most} are "
                    "allowed in one request; send fewer, or with `detail` low",
                )
        turns = asyncio.Semaphore(_MAX_OF_REQUEST)

        async def one(place: PicturePlace) -> Picture:
            file, param = request.files[place.number], request.head.images[place.number].param
            async with turns:
                key, pixels = await self._prepared(file, param, spec, place.grid, request.head.tenant)
            return Picture(place.at, place.grid, key, pixels)

        tasks = [asyncio.create_task(one(place)) for place in places]
        try:
            return tuple(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def rest_idle(self) -> None:
        """Ends the process if it was not used for a while."""
        if not self._num_jobs and time.monotonic() - self._last_job_s > _REST_AFTER_S:
            await self._pool.rest()

    async def close(self) -> None:
        await self._pool.close()

    async def _prepared(
        self, file: bytes, param: str, spec: PictureSpec, grid: PictureGrid, tenant: bytes
    ) -> tuple[bytes, bytes]:
        """Key and pixels."""
        # Some milliseconds, in which the interpreter lock is not held.
        key = await asyncio.to_thread(content_key, file, grid, spec.digest, tenant)
        if (pixels := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            return key, pixels
        reply = await self._decode(Decode(spec, grid, param, b""), file)
        self._keep(key, reply.pixels)
        return key, reply.pixels

    def _keep(self, key: bytes, pixels: bytes) -> None:
        if key not in self._known:
            self._known[key] = pixels
            self._num_known_bytes += len(pixels)
        while self._num_known_bytes > self.limits.cache_mb * 1_000_000:
            _, oldest = self._known.popitem(last=False)
            self._num_known_bytes -= len(oldest)

    async def _decode(self, job: Decode, file: bytes) -> Decoded:
        limits = self.limits
        self._num_jobs += 1
        try:
            async with self._turns:
                await self._pool.running()  # whose start does not count
                async with asyncio.timeout(limits.timeout_s):
                    reply = await self._pool.run(job, file)
        except TimeoutError:
            raise _exceeded(job.param, f"took longer than {limits.timeout_s:g} s (pictures.timeout_s)") from None
        except JobLost:
            taken = f"more than {limits.memory_mb} MB (pictures.memory_mb) or {limits.timeout_s:g} s (timeout_s)"
            raise _exceeded(job.param, f"took {taken}, or the file is damaged") from None
        except Unsendable as error:
            raise invalid(job.param, str(error)) from error
        except (PoolLost, OSError) as error:
            raise Overloaded(f"Pictures cannot be decoded now: {error}; try again.", retry_after_s=1) from error
        finally:
            self._num_jobs -= 1
            self._last_job_s = time.monotonic()
        if isinstance(reply, Rejected):
            raise error_of(reply)
        return reply

    async def _start(self) -> WorkerPool[Reply]:
        return await WorkerPool.start(
            "cortex.neuron.picture_process",
            *("--memory-bytes", str(self.limits.memory_mb * 1_000_000)),
            *("--cpu-s", str(math.ceil(self.limits.timeout_s))),
            reply_type=Reply,
            # Threads of a library would not survive a fork.
            environment={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )


def _exceeded(param: str, problem: str) -> PreparationLimitExceeded:
    return PreparationLimitExceeded(
        f"Invalid value for '{param}': decoding the picture {problem}; send a smaller one.", param=param
    )
