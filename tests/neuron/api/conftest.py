"""A scripted node behind the real API: a real tokenizer and template, scripted tokens, faults on demand."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cortex.http.composed_body import Body
from cortex.http.limits import ClientLimits
from cortex.neuron.api.access import NodeAccess, NodeKeys
from cortex.neuron.api.drain_gate import DrainGate
from cortex.neuron.engine.request import EngineRequest, EngineStats, PooledTexts, StepOutput, TokenLogprobs
from cortex.neuron.node.status import ServedModel
from cortex.neuron.picture_process.client import Pictures
from cortex.neuron.picture_process.limits import PictureLimits
from cortex.neuron.text.local import read_text
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.preparation import Prepared, prepare
from cortex.neuron.text.template.prompt import NO_RULES, PromptRules
from cortex.neuron.text.tokenizer.encoder import TextsToEncode
from cortex.wire.errors import CortexError, ModelInUse, ModelNotFound, prompt_too_long
from cortex.wire.node.load_options import SamplingDefaults
from cortex.wire.node.neighbours import Neighbour
from cortex.wire.node.orders import DeletedFiles, FilesRequest, HubRepository, LoadRequest, UnloadRequest
from cortex.wire.node.protocol import (
    Capabilities,
    Device,
    DeviceHealth,
    Discovery,
    Health,
    ModelLoad,
    ModelState,
    ModelStatus,
    NodeEvent,
    PullStatus,
)
from cortex.wire.packed_request import PackedRequest, unpack

from ..generations import PlayedGeneration
from .served import served

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if tools %}<tools>{{ tools | tojson }}</tools> <tool_call> </tool_call>{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}{% endif %}"
)
EOS = "<|im_end|>"
FILL_IN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


PICTURE_TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}\
{% endfor %}{% endif %}{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>
{% endfor %}{% if tools %}{{ tools }}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def add_pictures(folder: Path) -> None:
    """The model of `write_text_files` takes pictures: one token for each 32 × 32 pixels."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"model_type": "qwen3_5", "vision_config": {"patch_size": 16, "spatial_merge_size": 2}}
    (folder / "config.json").write_text(json.dumps(config))
    processor = {"size": {"shortest_edge": 1024, "longest_edge": 1 << 20}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS, "chat_template": PICTURE_TEMPLATE}))


def write_text_files(folder: Path) -> None:
    """A byte-level tokenizer with a template that supports tools and reasoning."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", EOS, *FILL_IN)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": EOS, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20}))


@pytest.fixture(scope="session")
def text_files() -> Callable[[Path], None]:
    return write_text_files


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder = tmp_path_factory.mktemp("text")
    write_text_files(folder)
    return TextModel.of(*read_text(folder))


def opened_gate() -> asyncio.Event:
    """An event that nobody waits for. A test replaces it by one that it sets later."""
    gate = asyncio.Event()
    gate.set()
    return gate


@dataclass
class Script:
    """What the engine does with a request: the text it generates, how fast, and how it ends."""

    text: str = "Hello there!"
    stops: bool = True
    pause_s: float = 0.0
    first_s: float = 0.0
    first_gate: asyncio.Event = field(default_factory=opened_gate)
    """The first output waits for it."""
    fails_after: int | None = None
    error: CortexError | None = None
    cached: int = 0


@dataclass
class ScriptedFiles:
    """Downloads that begin, and end when they are cancelled."""

    pulls: dict[str, PullStatus] = field(default_factory=dict)
    uploads: dict[str, bytes] = field(default_factory=dict)

    async def has_upload(self, digest: str) -> bool:
        return digest in self.uploads

    async def upload(self, digest: str, body: Body) -> None:
        self.uploads[digest] = body[: len(body)]

    def pull(self, request: FilesRequest) -> PullStatus:
        self.pulls[request.model_id] = PullStatus(model_id=request.model_id, quant=request.quant, state="running")
        return self.pulls[request.model_id]

    def pull_status(self, model_id: str) -> PullStatus:
        if model_id not in self.pulls:
            raise ModelNotFound(f"no download of {model_id}")
        return self.pulls[model_id]

    async def cancel(self, model_id: str) -> PullStatus:
        self.pulls[model_id] = PullStatus(model_id=self.pull_status(model_id).model_id, state="cancelled")
        return self.pulls[model_id]

    async def delete(self, request: FilesRequest) -> DeletedFiles:
        raise ModelInUse(f"{request.model_id} is in memory")

    async def offer(self, source: str) -> HubRepository:
        raise ModelNotFound(f"no repository {source}")


@dataclass
class ScriptedNode:
    """What the API needs of a `Node`, without devices."""

    text_model: TextModel
    script: Script = field(default_factory=Script)
    state: ModelState = ModelState.READY
    context_tokens: int = 2000
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    load_s: float = 0.0
    load_gate: asyncio.Event = field(default_factory=opened_gate)
    """Loads wait for it."""
    load_error: CortexError | None = None
    submit_error: Exception | None = None
    submitted: list[EngineRequest] = field(default_factory=list)
    transfers: set[str] = field(default_factory=set)
    """Requests whose KV arrives now."""
    generations: list[PlayedGeneration] = field(default_factory=list)
    num_taken_outputs: int = 0
    """Outputs after which the API has asked for more."""
    loads: list[LoadRequest] = field(default_factory=list)
    cancelled_loads: int = 0
    """Loads whose caller was cancelled before they were done."""
    events: list[NodeEvent] = field(default_factory=list)
    files: ScriptedFiles = field(default_factory=ScriptedFiles)
    pictures: Pictures = field(default_factory=lambda: Pictures(PictureLimits()))
    discovery: Discovery = field(
        default_factory=lambda: Discovery(
            host="test", os="linux", version="0", devices=(Device(index=0, kind="cpu", name="cpu", total_bytes=10),)
        )
    )

    @property
    def texts(self) -> ScriptedNode:
        return self

    def health(self) -> Health:
        device = DeviceHealth(index=0, total_bytes=10, free_bytes=4, utilisation=0.5, temperature_c=40)
        return Health(status="ok", uptime_s=1, devices=(device,), models=self.models())

    def models(self) -> tuple[ModelStatus, ...]:
        return (
            ModelStatus(
                id="org/tiny",
                state=self.state,
                family="tiny",
                context_tokens=self.context_tokens,
                sampling=self.sampling,
                measured_bytes=6,
                capabilities=Capabilities(vision=self.text_model.pictures is not None),
                host_bytes=5 if self.state is ModelState.ASLEEP else 0,
                load=ModelLoad(running=2, waiting=3, kv_used_fraction=0.25),
            ),
        )

    def model(self, model_id: str) -> ModelStatus:
        if model_id != "org/tiny":
            raise ModelNotFound(f"There is no model '{model_id}' here; did you mean 'org/tiny'?")
        return self.models()[0]

    def upstream(self, model_id: str) -> None:
        """Its requests are tokens."""

    def served(self, model_id: str) -> ServedModel:
        self.model(model_id)
        return ServedModel(self.state, self.context_tokens, self.sampling)

    def engine_stats(self) -> dict[str, EngineStats]:
        return {"org/tiny": EngineStats(steps=7, preemptions=1, num_pages=9, used_pages=4, cached_pages=2)}

    def task_restarts(self) -> dict[str, int]:
        return {"sample devices": 2}

    async def load(self, request: LoadRequest, *, wait: bool) -> ModelStatus:
        self.loads.append(request)
        self.model(request.model_id)
        if wait:
            try:
                await asyncio.sleep(self.load_s)
                await self.load_gate.wait()
            except asyncio.CancelledError:
                self.cancelled_loads += 1
                raise
            if self.load_error is not None:
                raise self.load_error
            self.state = ModelState.READY
        return self.model(request.model_id)

    async def unload(self, request: UnloadRequest) -> ModelStatus:
        self.model(request.model_id)
        self.state = ModelState.ASLEEP if request.sleep else ModelState.COLD
        return self.model(request.model_id)

    def forget_size(self, model_id: str) -> ModelStatus:
        return self.model(model_id)

    async def subscribe(self) -> AsyncIterator[NodeEvent]:
        for event in self.events:
            yield event

    async def text(self, model_id: str) -> TextModel:
        self.model(model_id)
        return self.text_model

    async def prepare(self, request: PackedRequest, *, in_context: bool = True, **_: Any) -> Prepared:
        self.model(request.head.model)
        rules = PromptRules(self.context_tokens) if in_context else NO_RULES
        return prepare(self.text_model, unpack(request.whole()), rules)

    async def count_tokens(self, request: PackedRequest, *, principal: str) -> int:
        return len((await self.prepare(request, principal=principal, in_context=False)).prompts[0].ids)

    async def encode(self, model_id: str, text: str, *, principal: str) -> tuple[int, ...]:
        self.model(model_id)
        return tuple(self.text_model.encode(text))

    async def encode_texts(self, model_id: str, texts: TextsToEncode, *, principal: str) -> PooledTexts:
        self.model(model_id)
        [ids] = self.text_model.tokenizer.encoder.encode_texts(texts).ids
        return PooledTexts(array("I", ids).tobytes(), (len(ids),))

    def tokenised_characters(self) -> dict[str, int]:
        return {"org/tiny": 11}

    async def recycle(self, device: int) -> bool:
        return self.state is ModelState.COLD

    def computes_fronts(self, model_id: str) -> bool:
        self.model(model_id)
        return True

    async def fetch_kv(self, model_id: str, request: EngineRequest, source: Neighbour) -> None:
        """KV arrives until nobody wants it any more."""
        self.model(model_id)
        self.transfers.add(request.id)
        try:
            await asyncio.Event().wait()
        finally:
            self.transfers.remove(request.id)

    def generate(self, model_id: str, request: EngineRequest) -> PlayedGeneration:
        if self.submit_error is not None:
            raise self.submit_error
        if len(request.prompt) >= self.context_tokens:
            raise prompt_too_long(len(request.prompt), self.context_tokens)
        self.submitted.append(request)
        generation = PlayedGeneration(self._outputs(request))
        self.generations.append(generation)
        return generation

    async def _outputs(self, request: EngineRequest) -> AsyncIterator[list[StepOutput]]:
        script = self.script
        await asyncio.sleep(script.first_s)
        await script.first_gate.wait()
        ids = self.text_model.encode(script.text)
        if script.stops and request.stop_token_ids:
            ids.append(request.stop_token_ids[0])
        for position, token in enumerate(ids):
            if script.fails_after == position:
                raise script.error or RuntimeError("a bug")
            if position:
                self.num_taken_outputs += 1
                await asyncio.sleep(script.pause_s)
            is_last = position + 1 == min(len(ids), request.max_tokens)
            finish: Any = None
            if is_last:
                finish = "stop" if token in request.stop_token_ids else "length"
            logprobs: tuple[TokenLogprobs, ...] = ()
            if (top := request.sampling.top_logprobs) is not None:
                logprobs = (TokenLogprobs(-0.5, (token, 0)[:top], (-0.5, -1.0)[:top]),)
            yield [StepOutput(request.id, (token,), logprobs, script.cached if position == 0 else None, finish)]
            if is_last:
                return


@pytest.fixture
def node(text: TextModel) -> ScriptedNode:
    return ScriptedNode(text)


@dataclass
class Api:
    """A running API in front of a scripted node."""

    node: ScriptedNode
    drain_gate: DrainGate
    url: str
    client: ClientSession

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.client.post(self.url + path, data=data, headers=headers) as response:
            return response.status, json.loads(await response.read()), response.headers

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.client.get(self.url + path) as response:
            return response.status, json.loads(await response.read())


@pytest.fixture
def node_keys() -> NodeKeys:
    """The keys that callers must send: none, until a test adds some."""
    return NodeKeys()


@pytest.fixture
def keepalive_s() -> float:
    """Longer than a response takes on a busy machine: a keepalive starts the stream, and then an error is an event.

    Tests of keepalives replace it: `@pytest.mark.parametrize("keepalive_s", [0.05])`.
    """
    return 30.0


@pytest.fixture
async def api(node: ScriptedNode, node_keys: NodeKeys, keepalive_s: float) -> AsyncIterator[Api]:
    drain_gate = DrainGate()
    access = NodeAccess(node_keys, ("node.example.com",))
    limits = ClientLimits(body_bytes=1_000_000)
    async with (
        served(node, drain_gate, keepalive_s=keepalive_s, limits=limits, access=access) as (host, port),
        ClientSession(headers={"content-type": "application/json"}) as client,
    ):
        yield Api(node, drain_gate, f"http://{host}:{port}", client)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "org/tiny", "messages": [{"role": "user", "content": "hi"}], **fields}


ChatBody = Callable[..., dict[str, Any]]


@pytest.fixture
def chat_body() -> ChatBody:
    return chat
