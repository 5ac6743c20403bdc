"""The text work of a node's models, which need not be loaded: each is opened on first use and kept after an unload."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from cortex.neuron.config import TextLimits
from cortex.neuron.engine.request import PooledTexts
from cortex.neuron.node.text.work import TextWork
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.preparation import Prepared
from cortex.neuron.text.template.prompt import PromptRules
from cortex.neuron.text.tokenizer.encoder import TextsToEncode
from cortex.neuron.tokenizer_process.client import TokenizerClient
from cortex.wire.packed_request import PackedRequest

_REST_AFTER_S = 60.0
"""The tokenizer process of a model that is not in memory ends after this long without use."""


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
        work = await self._opened(model_id, await self._path_of(model_id))
        return await work.text()

    async def prepare(
        self, request: PackedRequest, *, principal: str, in_context: bool = True, with_text: bool = False
    ) -> Prepared:
        """The prompts and the grammar of a request. With `in_context`, the prompts must fit the model's context; with
        `with_text` they have their text."""
        model_id = request.head.model
        path, rules = await self._path_of(model_id), self._rules_of(model_id)
        work = await self._opened(model_id, path)
        rules = rules if in_context else _unbounded(rules)
        return await work.prepare(request, rules, principal, with_text=with_text)

    async def count_tokens(self, request: PackedRequest, *, principal: str) -> int:
        """The number of tokens in the prompt of a request, which need not fit the context."""
        model_id = request.head.model
        path, rules = await self._path_of(model_id), self._rules_of(model_id)
        work = await self._opened(model_id, path)
        return await work.count(request, _unbounded(rules), principal)

    async def encode(self, model_id: str, text: str, *, principal: str) -> tuple[int, ...]:
        """The tokens of a text, including control tokens in it."""
        work = await self._opened(model_id, await self._path_of(model_id))
        return await work.encode(text, principal)

    async def encode_texts(self, model_id: str, texts: TextsToEncode, *, principal: str) -> PooledTexts:
        """The tokens of texts that are pooled."""
        work = await self._opened(model_id, await self._path_of(model_id))
        return await work.encode_texts(texts, principal)

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
        work = await self._opened(model_id, path)
        await work.wake()

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
