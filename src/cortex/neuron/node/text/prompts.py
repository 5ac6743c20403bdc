"""The prompts of requests, prepared from the text files of their model, which need not be loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cortex.neuron.node.loading.loader import ModelLoader
from cortex.neuron.node.models import Models
from cortex.neuron.node.text.models import Texts
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.preparation import Prepared
from cortex.neuron.text.template.prompt import PromptRules
from cortex.wire.errors import LoadFailed
from cortex.wire.packed_request import PackedRequest


class Prompts:
    """Belongs to the daemon's loop. Every method raises a CortexError, such as ModelNotFound or LoadFailed; cancelling
    a call ends its work."""

    def __init__(
        self,
        models: Models,
        loader: ModelLoader,
        texts: Texts,
        max_prompt_tokens: int | None,
        check_open: Callable[[], None],
    ) -> None:
        """`check_open` raises ShuttingDown once the node is closing."""
        self._models = models
        self._loader = loader
        self._texts = texts
        self._max_prompt_tokens = max_prompt_tokens
        self._check_open = check_open

    async def text(self, model_id: str) -> TextModel:
        """The model's tokenizer, template and parsers, read once and without its weights."""
        return await self._texts.get(model_id, await self._path(model_id))

    async def prepare(self, request: PackedRequest, *, principal: str, in_context: bool = True) -> Prepared:
        """The prompts and the grammar of a request. With `in_context`, the prompts must fit the model's context."""
        model_id = request.head.model
        path, rules = await self._path(model_id), self._rules(model_id)
        if in_context:
            context_tokens = self._models.status(model_id).context_tokens
            rules = replace(rules, context_tokens=context_tokens, max_prompt_tokens=self._max_prompt_tokens)
        return await self._texts.prepare(model_id, path, request, rules, principal)

    async def count_tokens(self, request: PackedRequest, *, principal: str) -> int:
        """The number of tokens in the prompt of a request, which need not fit the context."""
        model_id = request.head.model
        path, rules = await self._path(model_id), self._rules(model_id)
        return await self._texts.count(model_id, path, request, rules, principal)

    async def encode(self, model_id: str, text: str, *, principal: str) -> tuple[int, ...]:
        """The tokens of a text, including control tokens in it."""
        return await self._texts.encode(model_id, await self._path(model_id), text, principal)

    def _rules(self, model_id: str) -> PromptRules:
        return PromptRules(control_tokens_in_messages=self._models.options(model_id).control_tokens_in_messages)

    async def _path(self, model_id: str) -> Path:
        """The model's local files."""
        self._check_open()
        model, survey = self._models.options(model_id), self._loader.surveys.get(model_id)
        if survey is None and (damage := self._loader.damaged.get(model_id)) is not None:
            raise LoadFailed(damage)
        path = survey.facts.path if survey is not None else await self._loader.find_local(model)
        if path is None:
            raise LoadFailed(f"the files of {model_id} are not on this node yet; POST /models/load fetches them")
        return path
