"""A model's tokenizer process, which is started on first use and again when it has died."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cortex.ipc.channel import Unsendable
from cortex.ipc.helper import Function, Helper
from cortex.ipc.pool import CallLost, HelperPool, PoolLost
from cortex.neuron.text.errors import TextFileMalformed, TextModelError, TokenizerMissing, TokenizerUnsupported
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.preparation import Prepared
from cortex.neuron.text.template.prompt import PromptRules
from cortex.neuron.text.tokenizer.encoder import TextsToEncode
from cortex.neuron.tokenizer_process import protocol
from cortex.neuron.tokenizer_process.protocol import Described, FilesUnreadable, PackedPrepared, PackedTexts
from cortex.neuron.weights.errors import CheckpointError, Unsupported
from cortex.wire.errors import (
    BodyTooLarge,
    FilesDamaged,
    LoadFailed,
    ModelUnsupported,
    PreparationLimitExceeded,
    Recovering,
)

T = TypeVar("T")

_DESCRIBE: Function[Described | FilesUnreadable] = Function("describe", Described | FilesUnreadable)
_ENCODE: Function[bytes] = Function("encode", bytes)
_ENCODE_TEXTS: Function[PackedTexts] = Function("encode_texts", PackedTexts)
_COUNT: Function[tuple[int, int]] = Function("count", tuple[int, int])
_PREPARE: Function[PackedPrepared] = Function("prepare", PackedPrepared)

UNREADABLE = (OSError, TextModelError, CheckpointError)
"""The errors that reading a model's text files may raise."""


def load_error(what_failed: str, error: Exception) -> LoadFailed:
    """What a load reports for an error in `UNREADABLE`."""
    kind: type[LoadFailed] = LoadFailed
    if isinstance(error, (TokenizerUnsupported, Unsupported)):
        kind = ModelUnsupported
    elif isinstance(error, (TokenizerMissing, TextFileMalformed)):
        kind = FilesDamaged
    return kind(f"{what_failed}: {error}")


class TokenizerClient:
    """The daemon's side of a tokenizer process. Belongs to one loop.

    A job whose process dies is run once more, in a new process. A job that ends its own worker fails. Cancelling a call
    ends its job, wherever it is. Callers bound the number of concurrent jobs: each has a worker process.
    """

    def __init__(
        self, model: Path, chat_template: str | None = None, memory_bytes: int | None = None, read_s: float = 60.0
    ) -> None:
        """`chat_template`: in place of that of the files. `memory_bytes`: the most that reading the files may allocate,
        and each job. `read_s`: the most that reading them may take. Does not start the process."""
        self._model = model
        self._chat_template = chat_template
        self._memory_bytes = memory_bytes
        self._read_s = read_s
        self._pool = HelperPool(
            Helper(
                name="neuron-tokenize",
                purpose=f"the tokenizer process of {model}",
                module="cortex.neuron.tokenizer_process.service",
                arguments=(str(model), None, chat_template),
                memory_bytes=memory_bytes,
                start_cpu_s=math.ceil(read_s),
                # A worker is one job; threads of the library's own would also not survive a fork.
                environment={"TOKENIZERS_PARALLELISM": "false"},
            )
        )
        self.num_tokenised = 0
        """Characters of prompts that were tokenised, not known from earlier ones."""

    @property
    def idle_s(self) -> float:
        """Seconds since the last call ended; 0 during a call."""
        return self._pool.idle_s

    @property
    def process_id(self) -> int | None:
        """None while no process was started."""
        return self._pool.process_id

    async def read(self) -> TextModel:
        """The model's text. Raises the errors in `UNREADABLE`, or Recovering. A process that exceeds its limits
        while it reads is ended."""
        try:
            reply = await self._pool.call(_DESCRIBE, timeout_s=self._read_s)
        except TimeoutError:
            await self._pool.rest()
            raise self._exceeded() from None
        except (CallLost, PoolLost) as error:
            if self._pool.is_closed:
                raise self._recovering(error) from error
            raise self._exceeded() from None
        if isinstance(reply, FilesUnreadable):
            raise protocol.error_of(reply)
        # A later process must find the same.
        arguments = (str(self._model), reply.fingerprint, self._chat_template)
        self._pool.helper = msgspec.structs.replace(self._pool.helper, arguments=arguments)
        return TextModel.without_encoder(reply.files, reply.reasoning_end, reply.takes_tools)

    async def wake(self) -> None:
        """Starts the process unless it runs, without waiting until it is ready. Raises OSError or Recovering."""
        try:
            await self._pool.start()
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
        reply = await self._call(_PREPARE, rules, with_text, body=request, is_long=is_long)
        self.num_tokenised += reply.num_tokenised
        return protocol.unpack_prepared(reply)

    async def count(self, request: bytes, rules: PromptRules, *, is_long: bool) -> int:
        """The number of tokens in the prompt of a packed request."""
        num_tokens, num_tokenised = await self._call(_COUNT, rules, body=request, is_long=is_long)
        self.num_tokenised += num_tokenised
        return num_tokens

    async def encode(self, text: str, rules: PromptRules, *, is_long: bool) -> tuple[int, ...]:
        """The tokens of `text`, including control tokens in it."""
        return protocol.unpacked(await self._call(_ENCODE, text, rules, is_long=is_long))

    async def encode_texts(self, texts: TextsToEncode, rules: PromptRules, *, is_long: bool) -> PackedTexts:
        """The tokens of texts that are pooled."""
        return await self._call(_ENCODE_TEXTS, texts, rules, is_long=is_long)

    async def _call(self, function: Function[T], *arguments: Any, body: bytes = b"", is_long: bool) -> T:
        try:
            return await self._pool.call(function, *arguments, body=body, in_background=is_long)
        except CallLost as error:
            raise PreparationLimitExceeded(
                "Preparing this request took more memory than this node allows (text.memory_mb in neuron.toml). "
                "Send a shorter conversation, or a simpler schema or grammar, with shorter chains of references."
            ) from error
        except Unsendable as error:
            raise BodyTooLarge(f"The prompt cannot be tokenised: {error}.") from error
        except PoolLost as error:
            raise self._recovering(error) from error

    def _exceeded(self) -> TextFileMalformed:
        memory = "" if self._memory_bytes is None else f", or {self._memory_bytes / 1e6:.0f} MB of memory"
        return TextFileMalformed(
            f"reading the text files of {self._model.name} takes more than {self._read_s:g} s{memory} "
            "(text.timeout_s and text.memory_mb in neuron.toml); they are damaged: download the model again"
        )

    def _recovering(self, error: Exception) -> Recovering:
        return Recovering(f"the tokenizer of {self._model.name} cannot run: {error}; try again")
