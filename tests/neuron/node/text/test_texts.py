"""The text work of a node's models, with fake sources that record the calls."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from cortex.neuron.config import TextLimits
from cortex.neuron.node.texts import Texts
from cortex.neuron.text.errors import TextFileMalformed
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.preparation import Prepared
from cortex.neuron.text.template.prompt import NO_RULES, PromptRules
from cortex.neuron.text.tokenizer.encoder import TextsToEncode
from cortex.neuron.tokenizer_process.client import TokenizerClient
from cortex.neuron.tokenizer_process.protocol import PackedTexts, packed
from cortex.wire.errors import LoadFailed, Overloaded, PreparationLimitExceeded, Recovering
from cortex.wire.packed_request import PackedRequest, pack
from cortex.wire.requests import GenerateRequest, OutputFormat

from ....waiting import WAIT_S

HERE, THERE = Path("here"), Path("there")
LIMITS = TextLimits(workers=1, timeout_s=WAIT_S)


class Source:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.idle_s = 0.0
        self.num_tokenised = 0
        self.calls: list[str] = []
        self.literal: list[tuple[tuple[int, int], ...]] = []
        self.rules: list[PromptRules] = []
        self.error: Exception | None = None
        self.has_read = asyncio.Event()
        self.may_end = asyncio.Event()

    async def read(self) -> TextModel:
        self.calls.append("read")
        await asyncio.sleep(0)
        self.has_read.set()
        if self.error is not None:
            raise self.error
        return cast(TextModel, SimpleNamespace())  # `Texts` uses nothing of it

    async def wake(self) -> None:
        self.calls.append("wake")

    async def rest(self) -> None:
        self.calls.append("rest")

    async def close(self) -> None:
        self.calls.append("close")

    async def prepare(self, request: bytes, rules: PromptRules, *, is_long: bool, with_text: bool = False) -> Prepared:
        self.rules.append(rules)
        kind = "long" if is_long else "short"
        self.calls.append(kind)
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.calls.append(f"{kind} cancelled")
            raise
        return Prepared(())

    async def count(self, request: bytes, rules: PromptRules, *, is_long: bool) -> int:
        raise NotImplementedError

    async def encode(self, text: str, rules: PromptRules, *, is_long: bool) -> tuple[int, ...]:
        raise NotImplementedError

    async def encode_texts(self, texts: TextsToEncode, rules: PromptRules, *, is_long: bool) -> PackedTexts:
        """One token for each character."""
        self.calls.append(f"encode {len(texts.texts)} {'long' if is_long else 'short'}")
        self.literal += texts.literal
        ids = b"".join(packed([ord(character) for character in text]) for text in texts.texts)
        return PackedTexts(ids, tuple(map(len, texts.texts)), ())


@pytest.fixture
def opened() -> list[Source]:
    return []


def make_texts(opened: list[Source], paths: dict[str, Path], limits: TextLimits = LIMITS) -> Texts:
    def open_text(path: Path, _: str | None) -> TokenizerClient:
        opened.append(Source(path))
        return cast(TokenizerClient, opened[-1])

    async def path_of(model_id: str) -> Path:
        return paths.get(model_id, HERE)

    return Texts(open_text, limits, 2, path_of, lambda _: NO_RULES, lambda _: None)


@pytest.fixture
def paths() -> dict[str, Path]:
    """Where models are, if not `HERE`."""
    return {}


@pytest.fixture
def texts(opened: list[Source], paths: dict[str, Path]) -> Texts:
    return make_texts(opened, paths)


async def test_tokens_without_a_grammar_need_no_process(
    texts: Texts, opened: list[Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[GenerateRequest] = []

    def prepare(_: TextModel, request: GenerateRequest, __: PromptRules) -> Prepared:
        prepared.append(request)
        return Prepared(())

    monkeypatch.setattr("cortex.neuron.node.texts.prepare", prepare)
    tokens = GenerateRequest(model="m", prompt=(1, 2), more_prompts=((3,),))
    await texts.prepare(pack(tokens), principal="")
    assert prepared == [tokens]
    assert opened[0].calls == ["read"]
    opened[0].may_end.set()
    constrained = msgspec.structs.replace(tokens, output=OutputFormat("json_object"))
    await texts.prepare(pack(constrained), principal="")
    assert opened[0].calls == ["read", "short"]


async def test_reads_a_text_once_for_concurrent_callers(texts: Texts, opened: list[Source]) -> None:
    one, two, _ = await asyncio.gather(texts.text("m"), texts.text("m"), texts.wake("m", HERE))
    assert one is two
    assert [source.calls for source in opened] == [["read", "wake"]]


async def test_another_path_replaces_the_text_and_closes_the_first(
    texts: Texts, opened: list[Source], paths: dict[str, Path]
) -> None:
    await texts.text("m")
    opened[0].num_tokenised = 5
    paths["m"] = THERE
    first, second = await asyncio.gather(texts.text("m"), texts.text("m"))
    assert first is second
    assert [source.path for source in opened] == [HERE, THERE]
    assert [source.calls for source in opened] == [["read", "close"], ["read"]]
    opened[1].num_tokenised = 2
    assert texts.tokenised_characters() == {"m": 7}


@pytest.mark.parametrize(
    ("error", "expected"), [(TextFileMalformed("broken"), LoadFailed), (Recovering("again"), Recovering)]
)
async def test_reads_again_after_a_failed_read(
    texts: Texts, opened: list[Source], error: Exception, expected: type[Exception]
) -> None:
    caller = asyncio.create_task(texts.text("m"))
    await asyncio.sleep(0)
    opened[0].error = error
    with pytest.raises(expected):
        await caller
    assert "close" in opened[0].calls
    await texts.text("m")
    assert len(opened) == 2


async def test_reads_again_after_an_error_that_no_caller_saw(texts: Texts, opened: list[Source]) -> None:
    caller = asyncio.create_task(texts.text("m"))
    await asyncio.sleep(0)
    opened[0].error = TextFileMalformed("broken")
    caller.cancel()
    await opened[0].has_read.wait()
    await texts.text("m")
    assert [source.calls for source in opened] == [["read", "close"], ["read"]]


async def test_cancelled_caller_does_not_stop_the_read(texts: Texts, opened: list[Source]) -> None:
    caller = asyncio.create_task(texts.text("m"))
    await asyncio.sleep(0)
    caller.cancel()
    await texts.text("m")
    assert opened[0].calls == ["read"]


async def test_rests_idle_texts_of_models_that_are_not_in_memory(texts: Texts, opened: list[Source]) -> None:
    for name in ("loaded", "counted", "forgotten"):
        await texts.text(name)
    for source, idle_s in zip(opened, (1e6, 1.0, 1e6), strict=True):
        source.idle_s = idle_s
    await texts.rest_idle(lambda model_id: model_id == "loaded")
    assert [source.calls[1:] for source in opened] == [[], [], ["rest"]]
    await texts.rest("unknown")
    await texts.close()
    assert all(source.calls[-1] == "close" for source in opened)


SHORT = pack(GenerateRequest(model="m", prompt="x"))
LONG = pack(GenerateRequest(model="m", prompt="x" * (1 << 21)))
CHOICES = tuple(f"choice {number}" for number in range(9999))
CONSTRAINED = pack(GenerateRequest(model="m", prompt="x", output=OutputFormat(kind="choice", choices=CHOICES)))


def preparing(texts: Texts, *requests: PackedRequest, principal: str = "p") -> list[asyncio.Task[Prepared]]:
    return [asyncio.create_task(texts.prepare(each, principal=principal)) for each in requests]


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_long_texts_and_large_grammars_do_not_delay_short_texts(texts: Texts, opened: list[Source]) -> None:
    long = preparing(texts, LONG, CONSTRAINED)
    await turns()
    short = preparing(texts, SHORT)
    await turns()
    assert opened[0].calls == ["read", "long", "short"]
    assert texts.num_jobs("m") == 3
    opened[0].may_end.set()
    await asyncio.gather(*short, *long)
    rules = opened[0].rules[1]
    assert (rules.max_characters, rules.max_grammar_characters) == (8_000_000, 1_024_000)
    assert texts.num_jobs("m") == 0


async def test_rejects_more_waiting_texts_than_the_queue_holds(texts: Texts, opened: list[Source]) -> None:
    waiting = preparing(texts, SHORT, SHORT, SHORT)
    await turns()
    with pytest.raises(Overloaded, match="2 prompts are waiting") as busy:
        await texts.prepare(SHORT, principal="p")
    assert busy.value.retry_after_s is not None
    assert busy.value.retry_after_s >= 1
    opened[0].may_end.set()
    await asyncio.gather(*waiting)


async def test_disconnected_client_ends_its_text_work_and_frees_its_place(texts: Texts, opened: list[Source]) -> None:
    running, waiting, last = preparing(texts, SHORT, SHORT, SHORT)
    await turns()
    waiting.cancel()
    running.cancel()
    await turns()
    assert opened[0].calls == ["read", "short", "short cancelled", "short"]
    opened[0].may_end.set()
    await last
    assert texts.num_jobs("m") == 0


async def test_text_work_over_the_deadline_is_rejected_and_ended(opened: list[Source]) -> None:
    texts = make_texts(opened, {}, TextLimits(workers=1, timeout_s=0.01))
    with pytest.raises(PreparationLimitExceeded, match=r"0\.01 s .text\.timeout_s"):
        await texts.prepare(SHORT, principal="p")
    assert opened[0].calls == ["read", "short", "short cancelled"]


async def test_queries_count_for_the_length_of_pairs(texts: Texts, opened: list[Source]) -> None:
    for query in ("q", "q" * (1 << 20)):
        await texts.encode_texts("m", TextsToEncode(("d",), (query,)), principal="a")
    assert opened[0].calls[-2:] == ["encode 1 short", "encode 1 long"]


async def test_divided_texts_keep_their_literal_parts(opened: list[Source]) -> None:
    texts = make_texts(opened, {}, TextLimits(workers=3, timeout_s=WAIT_S))
    literal = tuple(((0, end),) for end in (1, 2, 3))
    await texts.encode_texts("m", TextsToEncode(("d" * (1 << 15),) * 3, literal=literal), principal="a")
    assert sorted(opened[0].literal) == list(literal)
    assert opened[0].calls.count("encode 1 short") == 3
