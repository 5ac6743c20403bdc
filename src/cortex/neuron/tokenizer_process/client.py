"""A model's tokenizer process, which is started on first use and again when it has died."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path

from cortex.ipc.channel import Unsendable
from cortex.ipc.pool import JobLost, PoolLost, RestartedPool, WorkerPool
from cortex.neuron.text.errors import TextFileMalformed, TextModelError, TokenizerUnsupported
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.preparation import Prepared
from cortex.neuron.text.template.prompt import PromptRules
from cortex.neuron.text.tokenizer.encoder import TextsToEncode
from cortex.neuron.tokenizer_process import protocol
from cortex.neuron.tokenizer_process.protocol import Job, PackedTexts, Reply
from cortex.neuron.weights.errors import CheckpointError, Unsupported
from cortex.wire.errors import BodyTooLarge, LoadFailed, ModelUnsupported, Recovering
from cortex.wire.rejection import Rejected

UNREADABLE = (OSError, TextModelError, CheckpointError)
"""The errors that reading a model's text files may raise."""


def load_error(what_failed: str, error: Exception) -> LoadFailed:
    """What a load reports for an error in `UNREADABLE`."""
    kind = ModelUnsupported if isinstance(error, (TokenizerUnsupported, Unsupported)) else LoadFailed
    return kind(f"{what_failed}: {error}")


class TokenizerClient:
    """The daemon's side of a tokenizer process. Belongs to one loop.

    A job whose process dies is run once more, in a new process. A job that ends its own worker fails. Cancelling a call
    ends its job, wherever it is. Callers bound the number of concurrent jobs: each has a worker process.
    """

    def __init__(self, model: Path, memory_bytes: int | None = None, read_s: float = 60.0) -> None:
        """`memory_bytes`: the most that reading the files may allocate, and each job. `read_s`: the most that reading
        them may take. Does not start the process."""
        self._model = model
        self._memory_bytes = memory_bytes
        self._read_s = read_s
        self._pool: RestartedPool[Reply] = RestartedPool(f"the tokenizer process of {model}", self._start)
        self._fingerprint: str | None = None
        self.num_tokenised = 0
        """Characters of prompts that were tokenised, not known from earlier ones."""
        self._num_calls = 0
        self._last_call_s = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since the last call ended; 0 during a call."""
        return 0.0 if self._num_calls else time.monotonic() - self._last_call_s

    @property
    def process_id(self) -> int | None:
        """None while no process was started."""
        return self._pool.process_id

    async def read(self) -> TextModel:
        """The model's text. Raises the errors in `UNREADABLE`, or Recovering. A process that exceeds its limits
        while it reads is ended."""
        try:
            async with asyncio.timeout(self._read_s):
                reply = await self._run(protocol.Describe(), is_long=False)
        except TimeoutError:
            await self._pool.rest()
            raise self._exceeded() from None
        except (JobLost, Recovering):
            if self._pool.is_closed:
                raise
            raise self._exceeded() from None
        assert isinstance(reply, protocol.Described)
        self._fingerprint = reply.fingerprint
        return TextModel.without_encoder(reply.facts, reply.reasoning_end, reply.takes_tools)

    async def wake(self) -> None:
        """Starts the process unless it runs, without waiting until it is ready. Raises OSError or Recovering."""
        try:
            await self._pool.running()
        except PoolLost as error:
            raise self._recovering(error) from error

    async def rest(self) -> None:
        """Ends the process; the next call starts a new one."""
        await self._pool.rest()

    async def close(self) -> None:
        """Ends the process for good; running and later calls raise Recovering."""
        await self._pool.close()

    # Jobs. They raise a CortexError: what is wrong with the request, LoadFailed when a new process can no longer read
    # the files, or Recovering. `is_long`: the job yields the cores to others.

    async def prepare(self, request: bytes, rules: PromptRules, *, is_long: bool, with_text: bool = False) -> Prepared:
        """The prompts and the grammar of a packed request."""
        reply = await self._run_job(protocol.Prepare(request, rules, with_text), is_long=is_long)
        assert isinstance(reply, protocol.PackedPrepared)
        self.num_tokenised += reply.num_tokenised
        return protocol.unpack_prepared(reply)

    async def count(self, request: bytes, rules: PromptRules, *, is_long: bool) -> int:
        """The number of tokens in the prompt of a packed request."""
        reply = await self._run_job(protocol.Count(request, rules), is_long=is_long)
        assert isinstance(reply, protocol.Counted)
        self.num_tokenised += reply.num_tokenised
        return reply.num_tokens

    async def encode(self, text: str, rules: PromptRules, *, is_long: bool) -> tuple[int, ...]:
        """The tokens of `text`, including control tokens in it."""
        reply = await self._run_job(protocol.Encode(text, rules), is_long=is_long)
        assert isinstance(reply, protocol.Encoded)
        return protocol.unpacked(reply.ids)

    async def encode_texts(self, texts: TextsToEncode, rules: PromptRules, *, is_long: bool) -> PackedTexts:
        """The tokens of texts that are pooled."""
        reply = await self._run_job(protocol.EncodeTexts(texts, rules), is_long=is_long)
        assert isinstance(reply, PackedTexts)
        return reply

    async def _run_job(self, job: Job, *, is_long: bool) -> Reply:
        try:
            return await self._run(job, is_long=is_long)
        except UNREADABLE as error:
            raise LoadFailed(f"the tokenizer of {self._model.name} can no longer be read: {error}") from error
        except JobLost as error:
            raise protocol.out_of_memory() from error
        except Unsendable as error:
            raise BodyTooLarge(f"The prompt cannot be tokenised: {error}.") from error

    async def _run(self, job: Job, *, is_long: bool) -> Reply:
        """Raises the error that the tokenizer process replied with, JobLost, Unsendable, or Recovering when the
        process died twice."""
        self._num_calls += 1
        try:
            reply = await self._pool.run(job, in_background=is_long)
        except PoolLost as error:
            raise self._recovering(error) from error
        finally:
            self._num_calls -= 1
            self._last_call_s = time.monotonic()
        if isinstance(reply, protocol.FilesUnreadable | Rejected):
            raise protocol.error_of(reply)
        return reply

    def _exceeded(self) -> TextFileMalformed:
        memory = "" if self._memory_bytes is None else f", or {self._memory_bytes / 1e6:.0f} MB of memory"
        return TextFileMalformed(
            f"reading the text files of {self._model.name} takes more than {self._read_s:g} s{memory} "
            "(text.timeout_s and text.memory_mb in neuron.toml); they are damaged: download the model again"
        )

    def _recovering(self, error: PoolLost) -> Recovering:
        return Recovering(f"the tokenizer of {self._model.name} cannot run: {error}; try again")

    async def _start(self) -> WorkerPool[Reply]:
        """A process that reads the model's files, which must match what was read before."""
        fingerprint = () if self._fingerprint is None else ("--fingerprint", self._fingerprint)
        memory = () if self._memory_bytes is None else ("--memory-bytes", str(self._memory_bytes))
        return await WorkerPool.start(
            "cortex.neuron.tokenizer_process",
            *("--model", str(self._model)),
            *fingerprint,
            *memory,
            *("--read-cpu-s", str(math.ceil(self._read_s))),
            reply_type=Reply,
            # A worker is one job; threads of the library's own would also not survive a fork.
            environment={"TOKENIZERS_PARALLELISM": "false"},
        )
