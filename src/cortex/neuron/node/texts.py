"""The text work of a node's models, which need not be loaded: templates, tokenising and grammars, in a tokenizer
process for each model. It is opened on first use and kept after an unload.

Each job has a worker process, so few jobs run at once, and slots are assigned as fairly as those of the engine. Long
texts and large grammars have separate slots and never delay short texts.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from cortex.neuron.config import TextLimits
from cortex.neuron.engine.request import PooledTexts
from cortex.neuron.node.admission import Admission, QueuedRequest, QueueFull
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.preparation import Prepared, prepare
from cortex.neuron.text.template.prompt import NO_RULES, PromptRules
from cortex.neuron.text.tokenizer.encoder import TextsToEncode
from cortex.neuron.tokenizer_process.client import UNREADABLE, TokenizerClient, load_error
from cortex.neuron.tokenizer_process.protocol import PackedTexts
from cortex.wire.errors import LoadFailed, Overloaded, PreparationLimitExceeded
from cortex.wire.fields.constraints import is_constrained
from cortex.wire.packed_request import PackedRequest, with_tokens
from cortex.wire.words import duration, os_error_in_words

_REST_AFTER_S = 60.0
"""The tokenizer process of a model that is not in memory ends after this long without use."""
_LONG_BYTES = 1 << 20
"""A request with more text counts as long: it takes a tenth of a second or more, if its turns are new."""
_PART_CHARACTERS = 1 << 15
"""Texts to pool with fewer characters are tokenised by one process."""
_LONG_CONSTRAINED_BYTES = 1 << 15
"""A grammar beyond this size makes a request long: it may take seconds to compile."""


class TextWork:
    """Begins to read the model's files when it is made. Belongs to one loop.

    Jobs raise a CortexError: Overloaded when too many wait, PreparationLimitExceeded at the deadline.
    """

    def __init__(
        self,
        model_id: str,
        path: Path,
        chat_template: str | None,
        source: TokenizerClient,
        limits: TextLimits,
        max_queue: int,
    ) -> None:
        """`source`: of the files at `path`, with `chat_template` unless that is None."""
        self.path = path
        self.chat_template = chat_template
        self._model_id = model_id
        self._source = source
        self._limits = limits
        self._short = Admission(limits.num_workers, max_queue)
        self._long = Admission(max(1, limits.num_workers // 2), max_queue)
        self._reading = asyncio.create_task(source.read())

    @property
    def has_failed(self) -> bool:
        """Whether the files could not be read."""
        return self._reading.done() and self._reading.exception() is not None

    @property
    def num_jobs(self) -> int:
        """Jobs that run or wait."""
        return sum(lane.running + lane.waiting for lane in (self._short, self._long))

    @property
    def idle_s(self) -> float:
        return self._source.idle_s

    @property
    def num_tokenised(self) -> int:
        """Characters of prompts that were tokenised, not known from earlier ones."""
        return self._source.num_tokenised

    async def text(self) -> TextModel:
        """The model's text, once it has been read. Raises LoadFailed, or another CortexError."""
        try:
            return self._reading.result() if self._reading.done() else await asyncio.shield(self._reading)
        except UNREADABLE as error:
            raise load_error(f"{self._model_id}: its tokenizer cannot be read", error) from error

    async def wake(self) -> None:
        """Starts the process unless it runs. Raises LoadFailed."""
        try:
            await self._source.wake()
        except OSError as error:
            reason = os_error_in_words(error)
            raise LoadFailed(f"{self._model_id}: the tokenizer process cannot be started: {reason}") from error

    async def rest(self) -> None:
        """Ends the process, unless it is reading the files; the next job starts it again."""
        if self._reading.done():
            await self._source.rest()

    async def close(self) -> None:
        """Ends the process for good."""
        await self._source.close()

    async def closed(self) -> None:
        """Returns when the read has ended, which `close` interrupts."""
        await asyncio.gather(self._reading, return_exceptions=True)

    # Jobs

    async def prepare(
        self, request: PackedRequest, rules: PromptRules, principal: str, *, with_text: bool = False
    ) -> Prepared:
        """The prompts and the grammar of a request. Prompts of tokens without a grammar need no process. Only
        `with_text`, and for a request that echoes them, the prompts have their text."""
        if request.token_prompts and not is_constrained(request.head):
            tokenised = with_tokens(request.head, request.token_prompts)
            return prepare(await self.text(), tokenised, self._limited(rules))
        whole = request.whole()
        is_long = len(whole) > (_LONG_CONSTRAINED_BYTES if is_constrained(request.head) else _LONG_BYTES)
        async with self._slot(principal, is_long=is_long):
            return await self._source.prepare(whole, self._limited(rules), is_long=is_long, with_text=with_text)

    async def count(self, request: PackedRequest, rules: PromptRules, principal: str) -> int:
        """The number of tokens in the prompt of a request."""
        whole = request.whole()
        is_long = len(whole) > _LONG_BYTES
        async with self._slot(principal, is_long=is_long):
            return await self._source.count(whole, self._limited(rules), is_long=is_long)

    async def encode(self, text: str, principal: str) -> tuple[int, ...]:
        """The tokens of a text, including control tokens in it."""
        is_long = len(text) > _LONG_BYTES
        async with self._slot(principal, is_long=is_long):
            return await self._source.encode(text, self._limited(NO_RULES), is_long=is_long)

    async def encode_texts(self, texts: TextsToEncode, principal: str) -> PooledTexts:
        """The tokens of texts that are pooled. Many texts are divided among the worker processes."""
        parts = _divided(texts, self._limits.num_workers)
        is_long = sum(map(len, (*texts.texts, *texts.queries))) > _LONG_BYTES

        async def encode(part: TextsToEncode) -> PackedTexts:
            async with self._slot(principal, is_long=is_long):
                return await self._source.encode_texts(part, self._limited(NO_RULES), is_long=is_long)

        tasks = [asyncio.create_task(encode(part)) for part in parts]
        try:
            encoded = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return PooledTexts(
            b"".join(each.ids for each in encoded),
            tuple(length for each in encoded for length in each.lengths),
            tuple(first for each in encoded for first in each.first_segments),
        )

    def _limited(self, rules: PromptRules) -> PromptRules:
        return replace(
            rules,
            max_characters=self._limits.max_prompt_mb * 1_000_000,
            max_grammar_characters=self._limits.max_grammar_kb * 1000,
            max_grammar_cpu_s=self._limits.max_grammar_cpu_s,
        )

    @asynccontextmanager
    async def _slot(self, principal: str, *, is_long: bool) -> AsyncIterator[None]:
        """Waits for a slot and holds it, up to the deadline."""
        lane = self._long if is_long else self._short
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def start() -> None:
            if not started.done():
                started.set_result(None)

        def reject(retry_after_s: float) -> None:
            if not started.done():
                started.set_exception(self._overloaded(lane.waiting, retry_after_s))

        queued = QueuedRequest(principal, 0, start, reject)
        has_finished = False
        try:
            lane.enter(queued, time.monotonic())
            await started
            async with asyncio.timeout(self._limits.timeout_s):
                yield
            has_finished = True
        except QueueFull as full:
            raise self._overloaded(full.waiting, full.retry_after_s) from full
        except TimeoutError:
            raise PreparationLimitExceeded(
                f"Preparing this request took longer than {self._limits.timeout_s:g} s (text.timeout_s in "
                "neuron.toml). Send a shorter conversation, or a simpler schema or grammar."
            ) from None
        finally:
            lane.release(queued, time.monotonic(), finished=has_finished)

    def _overloaded(self, num_waiting: int, retry_after_s: float) -> Overloaded:
        return Overloaded(
            f"{self._model_id} is busy: {num_waiting} prompts are waiting to be tokenised; "
            f"try again in {duration(retry_after_s)}",
            retry_after_s=retry_after_s,
        )


def _divided(texts: TextsToEncode, num_parts: int) -> list[TextsToEncode]:
    """Parts of about the same length, in order; few texts are one part."""
    total = sum(map(len, texts.texts)) + sum(map(len, texts.queries))
    part_characters = max(_PART_CHARACTERS, -(-total // num_parts))
    bounds, filled = [0], 0
    for index, text in enumerate(texts.texts):
        filled += len(text) + (len(texts.queries[index]) if texts.queries else 0)
        if filled >= part_characters:
            bounds.append(index + 1)
            filled = 0
    if bounds[-1] < len(texts.texts):
        bounds.append(len(texts.texts))
    return [
        replace(
            texts,
            texts=texts.texts[first:end],
            queries=texts.queries[first:end],
            literal=texts.literal[first:end],
        )
        for first, end in pairwise(bounds)
    ]


class Texts:
    """Belongs to the daemon's loop. Calls for a request raise a CortexError, such as ModelNotFound or LoadFailed;
    cancelling a call ends its work."""

    def __init__(
        self,
        open_text: Callable[[Path, str | None], TokenizerClient],
        limits: TextLimits,
        max_queue: int,
        path_of: Callable[[str], Awaitable[Path]],
        rules_of: Callable[[str], PromptRules],
        template_of: Callable[[str], str | None],
    ) -> None:
        """`path_of` finds the files of a model, `rules_of` the bounds of its prompts, and `template_of` a chat template
        that replaces its files'. They raise a CortexError."""
        self._open_text = open_text
        self._limits = limits
        self._max_queue = max_queue
        self._path_of = path_of
        self._rules_of = rules_of
        self._template_of = template_of
        self._works: dict[str, TextWork] = {}
        self._tokenised_before: Counter[str] = Counter()
        """Characters counted by replaced works."""

    async def text(self, model_id: str) -> TextModel:
        """The model's tokenizer, template and parsers, read once and without its weights."""
        return await (await self._work(model_id)).text()

    async def prepare(
        self, request: PackedRequest, *, principal: str, in_context: bool = True, with_text: bool = False
    ) -> Prepared:
        """The prompts and the grammar of a request. With `in_context`, the prompts must fit the model's context; with
        `with_text` they have their text."""
        work = await self._work(request.head.model)
        rules = self._rules_of(request.head.model)
        return await work.prepare(request, rules if in_context else _unbounded(rules), principal, with_text=with_text)

    async def count_tokens(self, request: PackedRequest, *, principal: str) -> int:
        """The number of tokens in the prompt of a request, which need not fit the context."""
        work = await self._work(request.head.model)
        return await work.count(request, _unbounded(self._rules_of(request.head.model)), principal)

    async def encode(self, model_id: str, text: str, *, principal: str) -> tuple[int, ...]:
        """The tokens of a text, including control tokens in it."""
        return await (await self._work(model_id)).encode(text, principal)

    async def encode_texts(self, model_id: str, texts: TextsToEncode, *, principal: str) -> PooledTexts:
        """The tokens of texts that are pooled."""
        return await (await self._work(model_id)).encode_texts(texts, principal)

    def num_jobs(self, model_id: str) -> int:
        """Requests of the model that are being prepared, or wait for that."""
        work = self._works.get(model_id)
        return work.num_jobs if work is not None else 0

    def tokenised_characters(self) -> dict[str, int]:
        """Characters of prompts tokenised for each model, without cached ones."""
        now = {model_id: work.num_tokenised for model_id, work in self._works.items()}
        return {model_id: count + self._tokenised_before[model_id] for model_id, count in now.items()}

    async def wake(self, model_id: str, path: Path) -> None:
        """Reads the text and starts the process of a model that is about to serve from `path`. Raises LoadFailed."""
        await (await self._opened(model_id, path)).wake()

    async def rest(self, model_id: str) -> None:
        """Ends the process of a model that is not in memory, unless its text is being read."""
        if (work := self._works.get(model_id)) is not None:
            await work.rest()

    async def rest_idle(self, is_in_memory: Callable[[str], bool]) -> None:
        """Ends the processes of models that are not in memory and have been unused for a while."""
        for model_id, work in tuple(self._works.items()):
            if work.idle_s > _REST_AFTER_S and not is_in_memory(model_id):
                await work.rest()

    async def close(self) -> None:
        works = tuple(self._works.values())
        await asyncio.gather(*(work.close() for work in works))
        await asyncio.gather(*(work.closed() for work in works))

    async def _work(self, model_id: str) -> TextWork:
        return await self._opened(model_id, await self._path_of(model_id))

    async def _opened(self, model_id: str, path: Path) -> TextWork:
        """The work of a model whose files have been read. A failed read is forgotten, so that the next call tries
        again."""
        known, template = self._works.get(model_id), self._template_of(model_id)
        work = known
        if work is None or (work.path, work.chat_template) != (path, template) or work.has_failed:
            source = self._open_text(path, template)
            work = TextWork(model_id, path, template, source, self._limits, self._max_queue)
            self._works[model_id] = work
            if known is not None:
                self._tokenised_before[model_id] += known.num_tokenised
                await known.close()
        try:
            await work.text()
        except Exception:
            if self._works.get(model_id) is work:
                del self._works[model_id]
            await work.close()
            raise
        return work


def _unbounded(rules: PromptRules) -> PromptRules:
    return replace(rules, context_tokens=None, max_prompt_tokens=None)
