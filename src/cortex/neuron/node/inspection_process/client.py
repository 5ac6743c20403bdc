"""Reads the files of models in a process with limits: a model that exceeds them counts as damaged and affects nothing
else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from cortex.ipc.channel import Unsendable
from cortex.ipc.helper import Helper, function_of
from cortex.ipc.pool import CallLost, HelperPool, PoolLost
from cortex.neuron.config import Limits
from cortex.neuron.node.inspection_process import reading
from cortex.neuron.node.inspection_process.preflight import ModelMetadata
from cortex.neuron.node.inspection_process.reading import Read, unpack_metadata
from cortex.neuron.text.model import TextInspection
from cortex.wire.errors import FilesDamaged, LoadFailed

WALL_S: Final = 300.0
"""Disks may be slow."""
_MAX_JOBS: Final = 2

T = TypeVar("T")


class InspectionProcess:
    """Belongs to the daemon's loop. The process starts with the first job; a job that is cancelled ends."""

    def __init__(self, *, cpu_s: int, memory_bytes: int, wall_s: float = WALL_S) -> None:
        self._cpu_s = cpu_s
        self._wall_s = wall_s
        self._memory_bytes = memory_bytes
        self._pool = HelperPool(
            Helper(
                name="neuron-inspect",
                purpose="the inspection process",
                module="cortex.neuron.node.inspection_process.reading",
                memory_bytes=memory_bytes,
                cpu_s=cpu_s,
            )
        )
        self._turns = asyncio.Semaphore(_MAX_JOBS)

    @classmethod
    def of(cls, limits: Limits) -> InspectionProcess:
        return cls(cpu_s=limits.inspection_cpu_s, memory_bytes=limits.inspection_memory_mb << 20)

    @property
    def process_id(self) -> int | None:
        return self._pool.process_id

    async def find_local(self, source: str, cache: Path, quant: str | None) -> Path | None:
        """Where the model is, if all of it is on disk. Raises LoadFailed."""
        path = await self._call(source, reading.find_local, source, str(cache), quant)
        return None if path is None else Path(path)

    async def read(self, job: Read) -> ModelMetadata:
        """The metadata from config and headers. Raises a CortexError, usually LoadFailed."""
        return await asyncio.to_thread(unpack_metadata, await self._call(job.name, reading.read, job), job)

    async def read_text(self, path: Path, name: str, chat_template: str | None = None) -> TextInspection:
        """The metadata from the text files, with `chat_template` instead of theirs. Raises LoadFailed."""
        return await self._call(name, reading.read_text, str(path), name, chat_template)

    async def rest_idle(self) -> None:
        """Ends the process if it was not used for a while."""
        await self._pool.rest_idle()

    async def close(self) -> None:
        """Cancels running reads."""
        await self._pool.close()

    async def _call(self, name: str, function: Callable[..., T], *arguments: Any) -> T:
        """`name`: the model's, for errors."""
        try:
            async with self._turns:
                return await self._pool.call(function_of(function), *arguments, timeout_s=self._wall_s)
        except TimeoutError:
            raise FilesDamaged(
                f"{name} is damaged: reading its files takes more than {self._wall_s:g} s; download it again, or check "
                "the disk"
            ) from None
        except CallLost:
            raise FilesDamaged(
                f"{name} is damaged: reading its config, headers and chat template takes more than {self._cpu_s} s of "
                f"computing or {self._memory_bytes >> 20} MiB of memory (limits.inspection_cpu_s and "
                "inspection_memory_mb in neuron.toml); download it again"
            ) from None
        except (PoolLost, Unsendable) as error:
            raise LoadFailed(f"the files of {name} cannot be read now: {error}; try again") from error
