"""A real tokenizer process and its client."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cortex.ipc.fork_client import ForkServer, ForkServerProcess
from cortex.neuron.text.errors import TextFileMalformed, TokenizerMissing, TokenizerUnsupported
from cortex.neuron.text.local import read_text
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.preparation import prepare
from cortex.neuron.text.template.prompt import NO_RULES, PromptRules
from cortex.neuron.tokenizer_process.client import TokenizerClient
from cortex.neuron.weights.errors import Malformed
from cortex.wire.errors import ContextLengthExceeded, InvalidValue, LoadFailed, PreparationLimitExceeded, Recovering
from cortex.wire.packed_request import pack
from cortex.wire.requests import GenerateRequest, Message, OutputFormat, Text

from ...processes import alive
from ...waiting import WAIT_S, until
from ..weights.conftest import GGUFWriter

CONTROL = ("<|im_start|>", "<|im_end|>")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def write_model(folder: Path, **config: Any) -> Path:
    """A byte-level tokenizer with two control tokens, and with `greedy` one token that strips the space around it."""
    greedy = config.pop("greedy", False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in CONTROL])
    if greedy:
        tokenizer.add_tokens([AddedToken("<greedy>", lstrip=True, rstrip=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    stated = {"eos_token": CONTROL[1], "chat_template": TEMPLATE, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path)


@pytest.fixture
async def tokenizer(model: Path) -> AsyncIterator[TokenizerClient]:
    tokenizer = TokenizerClient(model)
    yield tokenizer
    await tokenizer.close()


def process_of(tokenizer: TokenizerClient) -> int:
    assert tokenizer.process_id is not None
    return tokenizer.process_id


async def encode(tokenizer: TokenizerClient, text: str) -> tuple[int, ...]:
    return await tokenizer.encode(text, NO_RULES, is_long=False)


def user_request(text: str) -> GenerateRequest:
    return GenerateRequest(model="m", messages=(Message(role="user", parts=(Text(text=text),)),))


class TokenizerOnOwnLoop:
    """A tokenizer client on its own event loop, for tests that are not coroutines."""

    def __init__(self, model: Path) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.tokenizer, self.text = self.run(self._open(model))

    async def _open(self, model: Path) -> tuple[TokenizerClient, TextModel]:
        tokenizer = TokenizerClient(model)
        return tokenizer, await tokenizer.read()

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def close(self) -> None:
        self.run(self.tokenizer.close())
        self._loop.call_soon_threadsafe(self._loop.stop)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "greedy"])
def remote_and_local(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TokenizerOnOwnLoop, TextModel]]:
    """The same model's text twice: encoded in a tokenizer process, and in this process."""
    folder = write_model(tmp_path_factory.mktemp("model"), greedy=request.param)
    remote = TokenizerOnOwnLoop(folder)
    yield remote, TextModel.of(*read_text(folder))
    remote.close()


PIECES = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.sampled_from([*CONTROL, "<greedy>", " <greedy> ", "long " * 99]),
)


@given(pieces=st.lists(PIECES, max_size=8))
def test_prepared_remotely_equals_prepared_locally(
    remote_and_local: tuple[TokenizerOnOwnLoop, TextModel], pieces: list[str]
) -> None:
    remote, local = remote_and_local
    text = "".join(pieces)
    for request in (user_request(text), GenerateRequest(model="m", prompt=text, more_prompts=((1, 2),), echo=True)):
        whole = pack(request).whole()
        expected = prepare(local, request, NO_RULES)
        prepared = remote.run(remote.tokenizer.prepare(whole, NO_RULES, is_long=False))
        assert [each.ids for each in prepared.prompts] == [each.ids for each in expected.prompts]
        assert [each.turn_ends for each in prepared.prompts] == [each.turn_ends for each in expected.prompts]
        assert not request.echo or prepared == expected
        assert remote.run(remote.tokenizer.count(whole, NO_RULES, is_long=True)) == len(expected.prompts[0].ids)
    assert list(remote.run(remote.tokenizer.encode(text, NO_RULES, is_long=False))) == local.encode(text)


def test_tokens_are_prepared_without_the_process(
    remote_and_local: tuple[TokenizerOnOwnLoop, TextModel],
) -> None:
    remote, local = remote_and_local[0].text, remote_and_local[1]
    request = GenerateRequest(model="m", prompt=(1, 2, 3), more_prompts=((0,),))
    prepared = prepare(remote, request, NO_RULES)
    assert prepared == prepare(local, request, NO_RULES)
    assert [each.ids for each in prepared.prompts] == [(1, 2, 3), (0,)]
    with pytest.raises(InvalidValue, match="outside the vocabulary"):
        prepare(remote, GenerateRequest(model="m", prompt=(1, remote.vocab_size)), NO_RULES)


def test_remote_text_has_the_same_facts_as_local_text(remote_and_local: tuple[TokenizerOnOwnLoop, TextModel]) -> None:
    remote, local = remote_and_local[0].text, remote_and_local[1]
    assert remote.tokenizer.vocabulary == local.tokenizer.vocabulary
    assert remote.decode(range(-3, remote.vocab_size + 3)) == local.decode(range(-3, local.vocab_size + 3))
    assert (remote.generation, remote.notes, remote.capabilities) == (local.generation, local.notes, local.capabilities)
    assert remote.reasoning_end == local.reasoning_end


async def test_process_starts_on_first_use_under_its_own_name(tokenizer: TokenizerClient) -> None:
    assert tokenizer.process_id is None
    await tokenizer.read()
    assert Path(f"/proc/{process_of(tokenizer)}/comm").read_text() == "neuron-tokenize\n"


async def test_next_call_replaces_a_process_that_died(tokenizer: TokenizerClient) -> None:
    await tokenizer.read()
    expected = await encode(tokenizer, "hello")
    for _ in range(2):
        first = process_of(tokenizer)
        os.kill(first, signal.SIGKILL)
        await until(lambda: not alive(first))  # noqa: B023 - awaited here; until then its worker may still reply
        assert await encode(tokenizer, "hello") == expected
        assert process_of(tokenizer) != first


async def test_resting_process_is_started_by_wake_or_by_the_next_call(tokenizer: TokenizerClient) -> None:
    await tokenizer.read()
    first = process_of(tokenizer)
    await tokenizer.rest()
    assert not alive(first)
    await tokenizer.wake()
    woken = process_of(tokenizer)
    await encode(tokenizer, "hello")
    assert process_of(tokenizer) == woken
    await tokenizer.rest()
    await encode(tokenizer, "hello")
    assert alive(process_of(tokenizer))
    assert 0.0 <= tokenizer.idle_s < WAIT_S


async def test_process_that_dies_twice_is_a_retryable_error(
    tokenizer: TokenizerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await tokenizer.read()
    await tokenizer.rest()
    start = ForkServer.start

    async def start_dead(fork_server: ForkServer) -> ForkServerProcess:
        process = await start(fork_server)
        os.kill(process.process_id, signal.SIGKILL)
        return process

    monkeypatch.setattr(ForkServer, "start", start_dead)
    with pytest.raises(Recovering, match="try again"):
        await encode(tokenizer, "hello")


async def test_new_process_rejects_files_that_changed(tokenizer: TokenizerClient, model: Path) -> None:
    await tokenizer.read()
    await tokenizer.rest()
    write_model(model, greedy=True)
    with pytest.raises(LoadFailed, match="changed"):
        await encode(tokenizer, "hello")


async def test_closed_client_starts_no_process(tokenizer: TokenizerClient) -> None:
    await tokenizer.read()
    process_id = process_of(tokenizer)
    await tokenizer.close()
    assert not alive(process_id)
    with pytest.raises(Recovering):
        await encode(tokenizer, "hello")


@pytest.mark.parametrize(
    ("file", "content", "error"),
    [
        ("tokenizer.json", None, TokenizerMissing),
        ("tokenizer.json", '{"model": 1', TextFileMalformed),
        ("tokenizer_config.json", "[]", TextFileMalformed),
        ("model.gguf", "not a GGUF file", Malformed),
        ("unsupported.gguf", None, TokenizerUnsupported),
    ],
)
async def test_errors_keep_their_type_and_message(
    model: Path, file: str, content: str | None, error: type[Exception]
) -> None:
    path = model / file if file.endswith(".gguf") else model
    if error is TokenizerUnsupported:
        writer = GGUFWriter().add("tokenizer.ggml.model", "of tomorrow").add("tokenizer.ggml.tokens", ["a"])
        path.write_bytes(writer.build())
    elif content is None:
        (model / file).unlink()
    else:
        (model / file).write_text(content)
    with pytest.raises(error) as here:
        read_text(path)
    tokenizer = TokenizerClient(path)
    with pytest.raises(error) as there:
        await tokenizer.read()
    await tokenizer.close()
    assert str(there.value) == str(here.value)


LOOPING = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ messages }}"
SWELLING = (
    "{% set ns = namespace(text='long ' * 999999) %}{% for a in range(64) %}{% set ns.text = ns.text * 2 %}{% endfor %}"
)


async def test_cancelled_job_ends_and_short_ones_run_meanwhile(model: Path) -> None:
    write_model(model, chat_template=LOOPING)
    tokenizer = TokenizerClient(model)
    text = await tokenizer.read()
    endless = asyncio.create_task(tokenizer.prepare(pack(user_request("hi")).whole(), NO_RULES, is_long=True))
    workers = Path(f"/proc/{process_of(tokenizer)}/task/{process_of(tokenizer)}/children")
    await until(lambda: len(workers.read_text().split()) == 2)
    words = [f"word {number}" for number in range(4)]
    encoded = await asyncio.gather(*(encode(tokenizer, word) for word in words))
    assert [text.decode(tokens) for tokens in encoded] == words
    before = len(workers.read_text().split())
    endless.cancel()
    await until(lambda: len(workers.read_text().split()) == before - 1)
    assert endless.cancelled()
    await tokenizer.close()


async def test_job_that_takes_too_much_memory_is_rejected_alone(model: Path) -> None:
    write_model(model, chat_template=SWELLING)
    tokenizer = TokenizerClient(model, memory_bytes=256 << 20)
    await tokenizer.read()
    process_id = process_of(tokenizer)
    with pytest.raises(PreparationLimitExceeded, match=r"text\.memory_mb"):
        await tokenizer.prepare(pack(user_request("hi")).whole(), NO_RULES, is_long=False)
    assert await encode(tokenizer, "a")
    assert process_of(tokenizer) == process_id
    await tokenizer.close()


async def test_errors_of_a_request_keep_their_code_and_details(tokenizer: TokenizerClient) -> None:
    with pytest.raises(ContextLengthExceeded) as too_long:
        await tokenizer.prepare(pack(user_request("hi" * 999)).whole(), PromptRules(20), is_long=False)
    assert too_long.value.details["context_tokens"] == 20
    choices = OutputFormat(kind="choice", choices=tuple(map(str, range(999))))
    asked = GenerateRequest(model="m", prompt="x", output=choices)
    with pytest.raises(InvalidValue, match=r"at most 500 .*text\.max_grammar_kb") as too_large:
        await tokenizer.prepare(pack(asked).whole(), PromptRules(max_grammar_characters=500), is_long=False)
    assert too_large.value.param == "response_format"


CHAIN = 20_000
"""References that follow one another. The grammar library recurses along them until the stack overflows."""
CHAINS = (
    OutputFormat(
        kind="grammar",
        text="".join(f't{i} ::= "a" t{i + 1}\n' for i in range(CHAIN)) + f"t{CHAIN} ::= root\nroot ::= t0",
    ),
    OutputFormat(
        kind="grammar", text="start: T0\n" + "".join(f"T{i}: T{i + 1}\n" for i in range(CHAIN)) + f'T{CHAIN}: "a"'
    ),
    OutputFormat(
        kind="json_schema",
        schema={
            "$ref": "#/$defs/0",
            "$defs": {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(CHAIN)} | {str(CHAIN): {}},
        },
    ),
)


@pytest.mark.parametrize("output", CHAINS, ids=["gbnf", "lark", "schema"])
async def test_grammar_that_overflows_the_stack_is_rejected_alone(
    tokenizer: TokenizerClient, output: OutputFormat
) -> None:
    asked = GenerateRequest(model="m", prompt="x", output=output)
    await tokenizer.read()
    process_id = process_of(tokenizer)
    with pytest.raises(PreparationLimitExceeded, match="chains of references"):
        await tokenizer.prepare(pack(asked).whole(), NO_RULES, is_long=True)
    assert await encode(tokenizer, "a")
    assert process_of(tokenizer) == process_id


DAEMON = """
    import asyncio, pathlib, sys
    from cortex.neuron.tokenizer_process.client import TokenizerClient

    async def main():
        tokenizer = TokenizerClient(pathlib.Path(sys.argv[1]))
        await tokenizer.wake() if sys.argv[2] == "reading" else await tokenizer.read()
        print(tokenizer.process_id, flush=True)
        await asyncio.sleep(3600)

    asyncio.run(main())
"""


@pytest.mark.parametrize("when", ["reading", "idle"])
async def test_process_ends_when_its_daemon_is_killed(model: Path, when: str) -> None:
    daemon = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DAEMON), str(model), when],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert daemon.stdout is not None
    with daemon.stdout:
        process_id = int(await asyncio.to_thread(daemon.stdout.readline))
    daemon.kill()
    daemon.wait(WAIT_S)
    await until(lambda: not alive(process_id))


FOLDED_FOR_EVER = "{{ (7**99999999) % 7 }}"
FOLDED_TO_GIGABYTES = '{{ "a"*2999999999 }}'


async def test_template_that_compiles_for_ever_is_an_error_of_its_file(model: Path) -> None:
    """Jinja computes constants while it compiles a template."""
    write_model(model, chat_template=FOLDED_FOR_EVER)
    tokenizer = TokenizerClient(model, read_s=3.0)
    with pytest.raises(TextFileMalformed, match=r"takes more than 3 s .*text\.timeout_s"):
        await tokenizer.read()
    assert tokenizer.process_id is None
    await tokenizer.close()


async def test_template_whose_constants_take_gigabytes_rejects_requests_within_its_memory(model: Path) -> None:
    write_model(model, chat_template=FOLDED_TO_GIGABYTES)
    tokenizer = TokenizerClient(model, memory_bytes=512 << 20)
    await tokenizer.read()
    with pytest.raises(PreparationLimitExceeded, match=r"text\.memory_mb"):
        await tokenizer.prepare(pack(user_request("hi")).whole(), NO_RULES, is_long=False)
    await tokenizer.close()


async def test_daemon_side_of_a_text_compiles_no_template(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> NoReturn:
        raise AssertionError("a template was compiled")

    tokenizer = TokenizerClient(model)
    for method in ("from_string", "parse"):
        monkeypatch.setattr(jinja2.Environment, method, fail)
    text = await tokenizer.read()
    assert text.capabilities.tools
    prepared = await tokenizer.prepare(pack(user_request("hi")).whole(), NO_RULES, is_long=False)
    assert text.parser(user_request("hi"), prepared.prompts[0])
    await tokenizer.close()
