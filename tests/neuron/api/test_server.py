"""The daemon as a process: real node, real worker, real engine, on a tiny model that is made here."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import ClientSession

from cortex.system.exits import ExitCode
from cortex.wire.sse import Parser

from ...ports import free_port
from ...processes import wait_end
from ...programs import PYTHONPATH
from ...waiting import NEVER_S, WAIT_S, until_response
from ..tiny_models import write_llama


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory, text_files: Any) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    text_files(folder)
    sizes = {"vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 4096}
    return write_llama(folder, std=0.1, **sizes, tie_word_embeddings=True, torch_dtype="float32", eos_token_id=257)


@dataclass
class Daemon:
    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def children(self) -> dict[int, str]:
        """Processes that the daemon started and that still run, with their command lines."""
        return children(self.process.pid)

    def fork_server(self) -> int:
        (found,) = [pid for pid, command in self.children().items() if "worker.program.worker" in command]
        return found


def children(process_id: int) -> dict[int, str]:
    listed = subprocess.run(
        ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(process_id)], capture_output=True, text=True, check=False
    )
    return {int(pid): command for pid, command in (line.split(maxsplit=1) for line in listed.stdout.splitlines())}


def start(folder: Path, config: str, port: int) -> Daemon:
    file = folder / f"neuron-{port}.toml"
    file.write_text(f'listen = "127.0.0.1:{port}"\nkeepalive_s = 0.2\n{config}')
    log = folder / f"neuron-{port}.log"
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "HF_HUB_CACHE": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "cortex.neuron", "--config", str(file)], stderr=log.open("wb"), env=environment
    )
    return Daemon(process, f"http://127.0.0.1:{port}", log)


@pytest.fixture(scope="module")
def daemon(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One for all tests. The first finds the model cold, the last ends it."""
    model = f'[[models]]\nid = "tiny"\nsource = "{model_folder}"\ncontext_tokens = 3000\n'
    config = f'harness.torch.dtype = "float32"\ndrain_s = {NEVER_S}\n{model}'
    started = start(tmp_path_factory.mktemp("daemon"), config, free_port())
    yield started
    started.process.kill()
    started.process.wait()


@pytest.fixture
async def http(daemon: Daemon) -> AsyncIterator[ClientSession]:
    async with ClientSession(daemon.url) as session:

        async def listens() -> bool:
            try:
                async with session.get("/health") as response:
                    assert response.status == 200
            except OSError:
                assert daemon.process.poll() is None, daemon.log.read_text()
                return False
            return True

        await until_response(listens)
        yield session


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}


async def model(http: ClientSession) -> dict[str, Any]:
    async with http.get("/models/tiny") as response:
        status: dict[str, Any] = await response.json()
        return status


async def health(http: ClientSession) -> str:
    async with http.get("/health") as response:
        return str((await response.json())["status"])


async def until_running(http: ClientSession, expected: bool) -> None:
    """Returns once requests run, or none does."""
    await until_response(lambda: model(http), lambda status: bool(status["load"]["running"]) is expected)


async def completion_tokens(http: ClientSession) -> float:
    """Tokens of all models, as counted by the node."""
    async with http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("neuron_completion_tokens_total{"))


async def check_prompt_scores(http: ClientSession) -> None:
    """Asserts that tokens have the same scores in a prompt as when they are drawn, in both fields that ask for them."""

    async def complete(**fields: Any) -> dict[str, Any]:
        body = {"model": "tiny", "temperature": 0, "ignore_eos": True, "logprobs": 2, **fields}
        async with http.post("/v1/completions", json=body) as response:
            reply: dict[str, Any] = await response.json()
        assert response.status == 200, reply
        return reply

    async with http.post("/tokenize", json={"model": "tiny", "prompt": "Hällo, it scores."}) as response:
        ids = (await response.json())["tokens"]
    written = [40, 97, 5, 250]
    expected: list[float] = []
    for place, token in enumerate(written):
        reply = await complete(prompt=ids + written[:place], max_tokens=1, allowed_token_ids=[token])
        expected += reply["choices"][0]["logprobs"]["token_logprobs"]
    prompt = ids + written
    for max_tokens in (0, 2):
        reply = await complete(prompt=[prompt, prompt], max_tokens=max_tokens, echo=True, prompt_logprobs=1)
        assert reply["usage"]["completion_tokens"] == 2 * max_tokens
        for choice in reply["choices"]:
            logprobs, scored = choice["logprobs"], choice["prompt_logprobs"]
            assert len(logprobs["tokens"]) == len(prompt) + max_tokens
            assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is scored[0] is None
            assert logprobs["token_logprobs"][len(ids) : len(prompt)] == pytest.approx(expected, abs=1e-4)
            assert choice["text"].startswith("Hällo, it scores.")
            entries = [entry[str(token)] for entry, token in zip(scored[len(ids) :], written, strict=True)]
            assert [entry["logprob"] for entry in entries] == pytest.approx(expected, abs=1e-4)
            best = [min(entry.values(), key=lambda one: one["rank"]) for entry in scored[1:]]
            assert all(one["rank"] == 1 for one in best)
            assert any(entry["rank"] > 1 for entry in entries)
    async with http.post("/v1/chat/completions", json=chat(prompt_logprobs=0, max_tokens=1)) as response:
        reply = await response.json()
    assert len(reply["prompt_logprobs"]) == reply["usage"]["prompt_tokens"]


async def check_applied_template(http: ClientSession) -> None:
    """Asserts that a conversation comes back as the text of its prompt."""
    async with http.post("/apply-template", json=chat()) as response:
        prompt = (await response.json())["prompt"]
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def check_contradictions(http: ClientSession) -> None:
    """Asserts that a format which no allowed token can write, at first or later, is the client's error."""
    async with http.post("/tokenize", json={"model": "tiny", "content": "ab"}) as response:
        a, b = (await response.json())["tokens"]
    for pattern in ("c", "abc"):
        body = {"prompt": "x", "regex": pattern, "allowed_token_ids": [a, b], "max_tokens": 9}
        async with http.post("/v1/completions", json={"model": "tiny", **body}) as response:
            error = (await response.json())["error"]
        assert (response.status, error["code"]) == (400, "invalid_value"), error
        assert "allowed_token_ids" in error["message"]
        assert error["param"] == "allowed_token_ids"
    async with http.post("/v1/completions", json={"model": "tiny", "prompt": ""}) as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, "prompt")


async def test_request_loads_the_model_and_disconnect_frees_it(daemon: Daemon, http: ClientSession) -> None:
    assert (await model(http))["state"] == "cold"
    async with http.post("/v1/chat/completions", json=chat(stream=True, max_tokens=5, ignore_eos=True)) as response:
        data = await response.read()
    assert response.status == 200
    assert data.startswith(b": keepalive"), "the client gets keepalives while the model loads"
    assert data.endswith(b"data: [DONE]\n\n")
    assert (await model(http))["state"] == "ready"

    async with openai.AsyncOpenAI(api_key="k", base_url=daemon.url + "/v1", max_retries=0) as client:
        request: Any = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 20,
            "seed": 3,
            "temperature": 1.0,
        }
        first = await client.chat.completions.create(**request)
        again = await client.chat.completions.create(**request)
        assert first.choices[0].message.content == again.choices[0].message.content
        assert again.usage is not None
        with pytest.raises(openai.BadRequestError, match="prompt is too long"):
            await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 4000}])

    await check_prompt_scores(http)
    await check_contradictions(http)
    await check_applied_template(http)
    for stream in (True, False):
        before = await completion_tokens(http)
        reading = asyncio.create_task(_read(http, chat(stream=stream, max_tokens=2900, ignore_eos=True)))
        await until_running(http, True)
        reading.cancel()
        await until_running(http, False)
        assert await completion_tokens(http) < before + 2900, "the response was not generated to its end"


async def test_killed_worker_ends_the_stream_with_an_error_and_the_model_recovers(
    daemon: Daemon, http: ClientSession
) -> None:
    await _read(http, chat(max_tokens=2))
    fork_server = daemon.fork_server()
    endless = chat(stream=True, max_tokens=2900, ignore_eos=True)
    async with http.post("/v1/chat/completions", json=endless) as response:
        await response.content.readany()
        os.kill(fork_server, signal.SIGKILL)  # and its worker with it
        last = Parser().feed(await response.read())[-1]
    assert json.loads(last.data)["error"]["code"] == "recovering"
    async with http.post("/v1/chat/completions", json=chat()) as response:
        if response.status != 200:
            assert (response.status, (await response.json())["error"]["code"]) == (503, "recovering")
            assert int(response.headers["retry-after"]) >= 1
    await until_response(lambda: model(http), lambda status: status["state"] == "ready")
    assert b'"finish_reason"' in await _read(http, chat(max_tokens=2))


async def test_processes_that_fork_have_one_thread(daemon: Daemon, http: ClientSession) -> None:
    """Of others, a fork copies no more than the locks that they hold."""
    await _read(http, chat(max_tokens=2))
    programs = {pid: command for pid, command in daemon.children().items() if "ipc.fork_server" in command}
    assert {"program.worker", "tokenizer_process"} <= {
        name for name in ("program.worker", "tokenizer_process") for command in programs.values() if name in command
    }
    assert {command: len(os.listdir(f"/proc/{pid}/task")) for pid, command in programs.items()} == dict.fromkeys(
        programs.values(), 1
    )


async def test_sigterm_drains(daemon: Daemon, http: ClientSession) -> None:
    (worker,) = children(daemon.fork_server())
    os.kill(worker, signal.SIGSTOP)  # until it goes on, the request runs
    running = asyncio.create_task(_read(http, chat(stream=True, max_tokens=20, ignore_eos=True)))
    await until_running(http, True)
    started = daemon.children()
    assert started
    daemon.process.send_signal(signal.SIGTERM)
    await until_response(lambda: health(http), "draining".__eq__)
    async with http.post("/v1/chat/completions", json=chat()) as response:
        assert response.status == 503
        assert (await response.json())["error"]["code"] == "shutting_down"
    os.kill(worker, signal.SIGCONT)
    assert (await running).endswith(b"data: [DONE]\n\n")
    assert await asyncio.to_thread(daemon.process.wait, WAIT_S) == 0
    for pid in started:
        await asyncio.to_thread(wait_end, pid)  # the kernel ends the last of them a moment later


async def _read(http: ClientSession, body: dict[str, Any]) -> bytes:
    async with http.post("/v1/chat/completions", json=body) as response:
        return await response.read()


def test_port_in_use_and_invalid_config_end_with_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        rejected = start(tmp_path, "", port)
        assert rejected.process.wait(WAIT_S) == ExitCode.NO_ROOM
        assert (
            rejected.log.read_text() == f"neuron: port {port} is in use; stop what runs there or set another `port`\n"
        )
    wrong = start(tmp_path, "drian_s = 3\n", free_port())
    assert wrong.process.wait(WAIT_S) == ExitCode.CONFIG
    output = wrong.log.read_text()
    assert "drain_s" in output
    assert "Traceback" not in output
