"""The tokenizer of a model: when a node reads it, keeps it and closes it."""

import asyncio
from pathlib import Path

import faulty_models
import pytest
from faulty_models import models, running_node

from cortex.neuron.text.errors import TextFileMalformed
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.preparation import Prepared
from cortex.neuron.text.template.prompt import PromptRules
from cortex.wire.errors import (
    LoadFailed,
    ModelNotFound,
    Recovering,
)
from cortex.wire.node.orders import UnloadRequest
from cortex.wire.node.protocol import ModelState
from cortex.wire.packed_request import pack
from cortex.wire.requests import GenerateRequest

from ....waiting import until
from ..node_calls import has_worker, load


async def test_reads_text_without_loading_the_weights(tmp_path: Path) -> None:
    async with running_node(tmp_path, models(tmp_path, m={})) as node:
        one, two = await asyncio.gather(node.texts.text("m"), node.texts.text("m"))
        assert one is two
        assert node.model("m").state is ModelState.COLD
        assert not has_worker(node)
        with pytest.raises(ModelNotFound):
            await node.texts.text("unknown")


async def test_cold_model_reports_its_size_without_starting_a_tokenizer(tmp_path: Path) -> None:
    made = []

    def open_text(path: Path, chat_template: str | None) -> faulty_models.PlainText:
        made.append(path)
        return faulty_models.PlainText(path, chat_template)

    async with running_node(tmp_path, models(tmp_path, m={}), open_text=open_text) as node:
        await until(lambda: node.model("m").estimate_bytes)
        assert node.model("m").family == "llama"
        assert node.model("m").capabilities.tools
        assert made == []
        for _ in range(2):
            await load(node, "m")
            await node.texts.text("m")
            await node.unload(UnloadRequest(model_id="m"))
        assert len(made) == 1


@pytest.mark.parametrize("has_weights", [True, False])
async def test_unreadable_tokenizer_fails_the_load_and_leaves_nothing_loaded(tmp_path: Path, has_weights: bool) -> None:
    """Whether the weights are loaded before or after it."""
    broken = True

    class BrokenText(faulty_models.PlainText):
        async def read(self) -> TextModel:
            if broken:
                worker = node.devices.supervisors[0]
                await until(lambda: worker.has_models)
                if has_weights:
                    await worker.memory()  # which it measures after the load
                raise TextFileMalformed("tokenizer.json is not a tokenizer; download the model again")
            return await super().read()

    behaviour = {} if has_weights else {"pieces": 100_000, "piece_s": 0.005}
    async with running_node(tmp_path, models(tmp_path, m=behaviour, n={}), open_text=BrokenText) as node:
        with pytest.raises(LoadFailed, match="tokenizer"):
            await load(node, "m")
        assert node.model("m").state is ModelState.FAILED
        assert not node.devices.supervisors[0].has_models
        broken = False
        await load(node, "n")


async def test_load_cancelled_while_the_tokenizer_is_read_leaves_nothing(tmp_path: Path) -> None:
    class SlowText(faulty_models.PlainText):
        async def read(self) -> TextModel:
            self.closed = asyncio.Event()
            await self.closed.wait()
            raise Recovering("closed")

        async def close(self) -> None:
            self.closed.set()

    async with running_node(tmp_path, models(tmp_path, m={}), open_text=SlowText) as node:
        loading = asyncio.create_task(load(node, "m"))
        await until(lambda: node.devices.supervisors[0].has_models)
        await node.devices.supervisors[0].memory()  # by now the worker has loaded it
        await node.unload(UnloadRequest(model_id="m"))
        with pytest.raises(LoadFailed, match="unloaded while"):
            await loading
        assert not node.devices.supervisors[0].has_models


async def test_tokenizer_process_ends_while_its_model_is_not_in_memory(tmp_path: Path) -> None:
    calls = []

    class WatchedText(faulty_models.PlainText):
        async def wake(self) -> None:
            calls.append("wake")

        async def rest(self) -> None:
            calls.append("rest")

        async def close(self) -> None:
            calls.append("close")

    async with running_node(tmp_path, models(tmp_path, m={}), open_text=WatchedText) as node:
        for count in (1, 2):
            await load(node, "m")
            await node.unload(UnloadRequest(model_id="m"))
            assert calls.count("wake") == count
            assert calls[-1] == "rest"
    assert calls[-1] == "close"


async def test_prompts_are_prepared_by_the_rules_of_their_model(tmp_path: Path) -> None:
    used: list[PromptRules] = []

    class RecordingText(faulty_models.PlainText):
        async def prepare(
            self, request: bytes, rules: PromptRules, *, is_long: bool, with_text: bool = False
        ) -> Prepared:
            used.append(rules)
            return Prepared(())

    config = models(tmp_path, m={})
    config["models"][0]["control_tokens_in_messages"] = True
    config |= {"limits": {"max_prompt_tokens": 77}, "text": {"max_prompt_mb": 1, "max_grammar_kb": 2}}
    packed = pack(GenerateRequest(model="m", prompt="x"))
    async with running_node(tmp_path, config, open_text=RecordingText) as node:
        await load(node, "m")
        await node.texts.prepare(packed, principal="p")
        assert used.pop() == PromptRules(4096, 77, 1_000_000, 2000, 2.0, control_tokens_in_messages=True)
        await node.texts.prepare(packed, principal="p", in_context=False)
        assert used.pop() == PromptRules(None, None, 1_000_000, 2000, 2.0, control_tokens_in_messages=True)
        with pytest.raises(ModelNotFound):
            await node.texts.prepare(pack(GenerateRequest(model="unknown", prompt="x")), principal="p")
