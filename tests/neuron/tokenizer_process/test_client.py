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
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cortex.neuron.text.errors import TextFileMalformed, TokenizerMissing, TokenizerUnsupported
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.tokenizer.local import read_text
from cortex.neuron.tokenizer_process.client import TokenizerClient
from cortex.neuron.tokenizer_process.process import TokenizerProcess
from cortex.neuron.weights.errors import Malformed
from cortex.wire.errors import LoadFailed, Recovering
from cortex.wire.requests import GenerateRequest, Message, Text

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


def alive(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def user_request(text: str) -> GenerateRequest:
    return GenerateRequest(model="m", messages=(Message(role="user", parts=(Text(text),)),))


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
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    def close(self) -> None:
        self.run(self.tokenizer.close())
        self._loop.call_soon_threadsafe(self._loop.stop)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "greedy"])
def remote_and_local(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TextModel, TextModel]]:
    """The same model's text twice: encoded in a tokenizer process, and in this process."""
    folder = write_model(tmp_path_factory.mktemp("model"), greedy=request.param)
    remote = TokenizerOnOwnLoop(folder)
    yield remote.text, TextModel.of(*read_text(folder))
    remote.close()


PIECES = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.sampled_from([*CONTROL, "<greedy>", " <greedy> ", "long " * 99]),
)


@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(PIECES, max_size=8))
def test_remote_encoding_equals_local_encoding(
    remote_and_local: tuple[TextModel, TextModel], pieces: list[str]
) -> None:
    remote, local = (text.tokenizer for text in remote_and_local)
    text = "".join(pieces)
    assert remote.encode(text) == local.encode(text)
    assert remote.encode_document(text) == local.encode_document(text)
    assert remote.encode_segmented(text) == local.encode_segmented(text)


def test_remote_text_has_the_same_facts_as_local_text(remote_and_local: tuple[TextModel, TextModel]) -> None:
    remote, local = remote_and_local
    assert remote.tokenizer.vocabulary == local.tokenizer.vocabulary
    assert remote.render(user_request("hé")) == local.render(user_request("hé"))
    assert remote.decode(range(-3, remote.vocab_size + 3)) == local.decode(range(-3, local.vocab_size + 3))
    assert (remote.generation, remote.notes, remote.capabilities) == (local.generation, local.notes, local.capabilities)


async def test_process_starts_on_first_use_under_its_own_name(tokenizer: TokenizerClient) -> None:
    assert tokenizer.process_id is None
    await tokenizer.read()
    assert Path(f"/proc/{process_of(tokenizer)}/comm").read_text() == "neuron-tokenize\n"


async def test_next_call_replaces_a_process_that_died(tokenizer: TokenizerClient) -> None:
    text = await tokenizer.read()
    expected = await asyncio.to_thread(text.encode, "hello")
    for _ in range(2):
        first = process_of(tokenizer)
        os.kill(first, signal.SIGKILL)
        assert await asyncio.to_thread(text.encode, "hello") == expected
        assert process_of(tokenizer) != first


async def test_resting_process_is_started_by_wake_or_by_the_next_call(tokenizer: TokenizerClient) -> None:
    text = await tokenizer.read()
    first = process_of(tokenizer)
    await tokenizer.rest()
    assert not alive(first)
    await tokenizer.wake()
    woken = process_of(tokenizer)
    await asyncio.to_thread(text.encode, "hello")
    assert process_of(tokenizer) == woken
    await tokenizer.rest()
    await asyncio.to_thread(text.encode, "hello")
    assert alive(process_of(tokenizer))
    assert 0.0 <= tokenizer.idle_s < 20.0


async def test_process_that_dies_twice_is_a_retryable_error(
    tokenizer: TokenizerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = await tokenizer.read()
    os.kill(process_of(tokenizer), signal.SIGKILL)
    start = TokenizerProcess.start

    async def start_dead(model: Path, fingerprint: str | None) -> TokenizerProcess:
        process = await start(model, fingerprint)
        os.kill(process.process_id, signal.SIGKILL)
        return process

    monkeypatch.setattr(TokenizerProcess, "start", start_dead)
    with pytest.raises(Recovering, match="try again"):
        await asyncio.to_thread(text.encode, "hello")


async def test_new_process_rejects_files_that_changed(tokenizer: TokenizerClient, model: Path) -> None:
    text = await tokenizer.read()
    await tokenizer.rest()
    write_model(model, greedy=True)
    with pytest.raises(LoadFailed, match="changed"):
        await asyncio.to_thread(text.encode, "hello")


async def test_closed_client_starts_no_process(tokenizer: TokenizerClient) -> None:
    text = await tokenizer.read()
    process_id = process_of(tokenizer)
    await tokenizer.close()
    assert not alive(process_id)
    with pytest.raises(Recovering):
        await asyncio.to_thread(text.encode, "hello")


@pytest.mark.parametrize(
    ("file", "content", "error"),
    [
        ("tokenizer.json", None, TokenizerMissing),
        ("tokenizer.json", '{"model": 1', TextFileMalformed),
        ("tokenizer_config.json", "[]", TextFileMalformed),
        ("model.gguf", "not a GGUF file", Malformed),
        ("unsupported", None, TokenizerUnsupported),
    ],
)
async def test_errors_keep_their_type_and_message(
    model: Path, file: str, content: str | None, error: type[Exception]
) -> None:
    path = model
    if file == "unsupported":
        foreign = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
        foreign.decoder = decoders.WordPiece()
        foreign.save(str(model / "tokenizer.json"))
    elif content is None:
        (model / file).unlink()
    else:
        (model / file).write_text(content)
        path = model / file if file.endswith(".gguf") else model
    with pytest.raises(error) as here:
        read_text(path)
    tokenizer = TokenizerClient(path)
    with pytest.raises(error) as there:
        await tokenizer.read()
    await tokenizer.close()
    assert str(there.value) == str(here.value)


async def test_rejects_encoding_on_the_event_loop(tokenizer: TokenizerClient) -> None:
    text = await tokenizer.read()
    with pytest.raises(AssertionError, match="event loop"):
        text.encode("hello")


async def test_short_texts_are_encoded_while_a_long_one_is(tokenizer: TokenizerClient) -> None:
    text = await tokenizer.read()
    long = asyncio.create_task(asyncio.to_thread(text.encode, "He said 1234 things. " * 30_000))
    shorts = 0
    while not long.done():
        assert text.decode(await asyncio.to_thread(text.encode, "a")) == "a"
        shorts += 1
    assert len(await long) == 630_000
    assert shorts >= 3


async def test_concurrent_callers_get_their_own_replies(tokenizer: TokenizerClient) -> None:
    text = await tokenizer.read()
    words = [f"word {number}" * 50 for number in range(40)]
    encoded = await asyncio.gather(*(asyncio.to_thread(text.encode, word) for word in words))
    assert [text.decode(tokens) for tokens in encoded] == words


DAEMON = """
    import asyncio, pathlib, sys
    from cortex.neuron.tokenizer_process.client import TokenizerClient

    async def main():
        tokenizer = TokenizerClient(pathlib.Path(sys.argv[1]))
        await tokenizer.wake() if sys.argv[2] == "reading" else await tokenizer.read()
        print(tokenizer.process_id, flush=True)
        await asyncio.sleep(60)

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
    daemon.wait(10)
    await until(lambda: not alive(process_id))
