"""The status of models, and that requests do without it."""

from pathlib import Path
from unittest.mock import Mock

import pytest
from aiohttp import ClientSession
from faulty_models import PlainText, models, running_node

from cortex.neuron.node import models as node_models
from cortex.neuron.node.status import describe_model
from cortex.neuron.text.local import read_text
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.preparation import Prepared, prepare
from cortex.neuron.text.template.prompt import PromptRules
from cortex.wire.packed_request import unpack

from ..api.conftest import write_text_files
from ..api.served import served
from .node_calls import load


async def test_requests_for_a_ready_model_build_no_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text_files(tmp_path)
    text_model = TextModel.of(*read_text(tmp_path))

    class LocalText(PlainText):
        async def read(self) -> TextModel:
            return text_model

        async def prepare(
            self, request: bytes, rules: PromptRules, *, is_long: bool, with_text: bool = False
        ) -> Prepared:
            return prepare(text_model, unpack(request), rules)

        async def count(self, request: bytes, rules: PromptRules, *, is_long: bool) -> int:
            return 1

        async def encode(self, text: str, rules: PromptRules, *, is_long: bool) -> tuple[int, ...]:
            return (1,)

    built = Mock(side_effect=describe_model)
    monkeypatch.setattr(node_models, "describe_model", built)
    completion = {"model": "m", "prompt": [1, 2], "max_tokens": 2}
    conversation = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    async with (
        running_node(tmp_path, models(tmp_path, m={}), open_text=LocalText) as node,
        served(node) as (host, port),
        ClientSession(f"http://{host}:{port}") as client,
    ):
        await load(node)
        assert built.called
        built.reset_mock()
        for path, body in (
            ("/v1/completions", completion),
            ("/v1/completions", {**completion, "stream": True}),
            ("/v1/messages/count_tokens", conversation),
            ("/tokenize", conversation),
            ("/tokenize", {"model": "m", "prompt": "hi"}),
        ):
            async with client.post(path, json=body) as response:
                assert response.status == 200, await response.text()
                await response.read()
            assert not built.called, path


async def test_status_and_requests_see_the_same_context_and_sampling(tmp_path: Path) -> None:
    config = models(tmp_path, m={})
    config["models"][0] |= {"context_tokens": 1000, "sampling": {"temperature": 0.5}}
    async with running_node(tmp_path, config) as node:
        for _ in range(2):
            status, needed = node.model("m"), node.served("m")
            assert (needed.state, needed.context_tokens) == (status.state, status.context_tokens)
            assert needed.sampling == status.sampling
            await load(node)
        assert (needed.sampling.temperature, needed.sampling.top_k) == (0.5, 40)
