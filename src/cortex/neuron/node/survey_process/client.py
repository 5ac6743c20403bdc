"""Reads the files of models in a process with limits: a model that exceeds them is damaged, and nothing else is."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Final, Protocol

from cortex.ipc.pool import JobLost, PoolLost, RestartedPool, WorkerPool
from cortex.neuron.config import Limits
from cortex.neuron.node.loading.preflight import ModelFacts
from cortex.neuron.node.survey_process import protocol
from cortex.neuron.node.survey_process.protocol import (
    Find,
    FoundAt,
    FoundFacts,
    FoundText,
    Job,
    Read,
    ReadText,
    Reply,
)
from cortex.neuron.text.model import TextSurvey
from cortex.wire.errors import LoadFailed
from cortex.wire.rejection import Rejected, error_of

WALL_S: Final = 300.0
"""Disks may be slow."""
_MAX_JOBS: Final = 2
_REST_AFTER_S: Final = 60.0


class Surveys(Protocol):
    """Reads the files of models. Belongs to the daemon's loop."""

    async def find_local(self, source: str, cache: Path, quant: str | None) -> Path | None:
        """Where the model is, if all of it is on disk. Raises LoadFailed."""

    async def read(self, job: Read) -> ModelFacts:
        """What the config and the headers say. Raises a CortexError, LoadFailed above all."""

    async def read_text(self, path: Path, name: str) -> TextSurvey:
        """What the text files say. Raises LoadFailed."""

    async def rest_idle(self) -> None:
        """Ends the process if it was not used for a while."""

    async def close(self) -> None:
        """Ends what is being read."""


class SurveyProcess:
    """The real `Surveys`. The process starts with the first job; a job that is cancelled ends."""

    def __init__(self, *, cpu_s: int, memory_bytes: int, wall_s: float = WALL_S) -> None:
        self._cpu_s = cpu_s
        self._wall_s = wall_s
        self._memory_bytes = memory_bytes
        self._pool: RestartedPool[Reply] = RestartedPool("the survey process", self._start)
        self._turns = asyncio.Semaphore(_MAX_JOBS)
        self._num_jobs = 0
        self._last_job_s = time.monotonic()

    @classmethod
    def of(cls, limits: Limits) -> SurveyProcess:
        return cls(cpu_s=limits.survey_cpu_s, memory_bytes=limits.survey_memory_mb << 20)

    @property
    def process_id(self) -> int | None:
        return self._pool.process_id

    async def find_local(self, source: str, cache: Path, quant: str | None) -> Path | None:
        reply = await self._run(Find(source, str(cache), quant), source)
        assert isinstance(reply, FoundAt)
        return None if reply.path is None else Path(reply.path)

    async def read(self, job: Read) -> ModelFacts:
        reply = await self._run(job, job.name)
        assert isinstance(reply, FoundFacts)
        return await asyncio.to_thread(protocol.unpack_facts, reply, job)

    async def read_text(self, path: Path, name: str) -> TextSurvey:
        reply = await self._run(ReadText(str(path), name), name)
        assert isinstance(reply, FoundText)
        return protocol.unpack_text(reply)

    async def rest_idle(self) -> None:
        if not self._num_jobs and time.monotonic() - self._last_job_s > _REST_AFTER_S:
            await self._pool.rest()

    async def close(self) -> None:
        await self._pool.close()

    async def _run(self, job: Job, name: str) -> Reply:
        self._num_jobs += 1
        try:
            async with self._turns, asyncio.timeout(self._wall_s):
                reply = await self._pool.run(job)
        except TimeoutError:
            raise LoadFailed(
                f"{name} is damaged: reading its files takes more than {self._wall_s:g} s; download it again, or check "
                "the disk"
            ) from None
        except JobLost:
            raise LoadFailed(
                f"{name} is damaged: reading its config, headers and chat template takes more than {self._cpu_s} s of "
                f"computing or {self._memory_bytes >> 20} MiB of memory (limits.survey_cpu_s and survey_memory_mb in "
                "neuron.toml); download it again"
            ) from None
        except (PoolLost, OSError) as error:
            raise LoadFailed(f"the files of {name} cannot be read now: {error}; try again") from error
        finally:
            self._num_jobs -= 1
            self._last_job_s = time.monotonic()
        if isinstance(reply, Rejected):
            raise error_of(reply)
        return reply

    async def _start(self) -> WorkerPool[Reply]:
        return await WorkerPool.start(
            "cortex.neuron.node.survey_process",
            *("--memory-bytes", str(self._memory_bytes)),
            *("--cpu-s", str(self._cpu_s)),
            reply_type=Reply,
        )
