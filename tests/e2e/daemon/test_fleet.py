"""A real gateway over two real neurons: what passes through both, and what happens when one of the three dies."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest
from click.testing import CliRunner

from cortex.cli.cortex import cortex
from cortex.gateway.ledger.keys import as_toml, generate

from ...ports import free_port
from ...programs import PYTHONPATH
from ...telemetry.otlp_collector import Collector, ReceivedSpan
from ...waiting import WAIT_S, wait_until
from .conftest import WIDE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .conftest import Daemon, StartDaemon

pytestmark = pytest.mark.e2e


KEY = generate("anna")
TRACE_ID, SPAN_ID = "1" * 32, "2" * 16
CHUNK_TOKENS = 32
MAX_RUNNING = 2
WORDS = "one two three four five six seven eight nine ten "
LONG_PROMPT = WORDS * 80
PROMPT_STEPS = len(LONG_PROMPT) // CHUNK_TOKENS  # a token is a byte


@dataclass
class Fleet:
    """`python -m cortex.gateway` over daemons; started again after it was killed."""

    folder: Path
    port: int
    start_node: Callable[[str], Daemon]
    """Start a daemon that listens there."""
    nodes: dict[str, Daemon]
    process: subprocess.Popen[bytes] | None = None
    num_asked: int = 0

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def start(self) -> None:
        with (self.folder / "log").open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cortex.gateway", "--config", str(self.folder / "cortex.toml")],
                stdin=subprocess.DEVNULL,
                stderr=output,
                env={**os.environ, "PYTHONPATH": PYTHONPATH},
            )
        wait_until(lambda: all(self.is_ready(name) for name in self.nodes))

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(WAIT_S)

    def get(self, path: str) -> Any:
        headers = {"authorization": f"Bearer {KEY.text}"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=WAIT_S) as response:
            return json.load(response)

    def is_ready(self, name: str) -> bool:
        try:
            nodes = self.get("/fleet/status")["nodes"]
        except OSError:
            return False
        return any(
            node["name"] == name and node["up"] and any(model["state"] == "ready" for model in node["models"])
            for node in nodes
        )

    def in_flight(self) -> dict[str, int]:
        """The requests of each node that has some."""
        nodes = self.get("/fleet/status")["nodes"]
        found = {node["name"]: sum(model["in_flight"] for model in node["models"]) for node in nodes}
        return {name: count for name, count in found.items() if count}

    def ask(self, path: str, **fields: Any) -> Conversation:
        self.num_asked += 1
        body = {"model": WIDE, "max_tokens": 4, "temperature": 0, **fields}
        return Conversation(self.port, path, json.dumps(body).encode())

    def usage(self) -> dict[str, int]:
        """The usage records, as `cortex usage` prints them."""
        shown = CliRunner().invoke(cortex, ["usage", "--json", "--config", str(self.folder / "cortex.toml")])
        rows = json.loads(shown.stdout or "[]")
        return rows[0] if rows else {"requests": 0, "prompt_tokens": 0, "completion_tokens": 0}


class Conversation:
    """One request on a connection of its own, read as it comes and left when the test says so."""

    def __init__(self, port: int, path: str, body: bytes, request_id: str = "e2e/1") -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
        head = (
            f"POST {path} HTTP/1.1",
            "host: x",
            f"authorization: Bearer {KEY.text}",
            f"x-request-id: {request_id}",
            f"traceparent: 00-{TRACE_ID}-{SPAN_ID}-01",
            "connection: close",
            f"content-length: {len(body)}",
        )
        self._socket.sendall("\r\n".join((*head, "", "")).encode() + body)
        self.received = b""

    def read_until(self, mark: bytes) -> bytes:
        while mark not in self.received:
            data = self._socket.recv(1 << 16)
            assert data, self.received
            self.received += data
        return self.received

    def read(self) -> bytes:
        """Everything, to the end."""
        while data := self._socket.recv(1 << 16):
            self.received += data
        return self.received

    def leave(self) -> None:
        self._socket.close()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def fleet(
    start_daemon: StartDaemon,
    tmp_path_factory: pytest.TempPathFactory,
    collector: Collector,
    loads_wide: str,
) -> Iterator[Fleet]:
    telemetry = f'telemetry = {{ endpoint = "{collector.endpoint}" }}'
    settings = (
        'log_format = "json"',
        "keepalive_s = 0.3",
        telemetry,
        "[limits]",
        f"prefill_chunk_tokens = {CHUNK_TOKENS}",
        f"max_num_seqs = {MAX_RUNNING}",
        loads_wide,
    )

    def start_node(listen: str) -> Daemon:
        return start_daemon(*settings, listen=listen, waits=False)

    nodes = {name: start_node("") for name in ("one", "two")}
    for node in nodes.values():
        node.wait_ready(WIDE)
    folder = tmp_path_factory.mktemp("fleet")
    port = free_port()
    lines = [
        f'[gateway]\nlisten = "127.0.0.1:{port}"\nmetrics_listen = "127.0.0.1:0"\nkeepalive_s = 0.2',
        "poll_interval_s = 0.2",  # while a test waits for what a poll finds, the engines compute
        'log_format = "json"\naccess_log = true',
        "[ledger]\nflush_s = 0.2",
        f'[telemetry]\nendpoint = "{collector.endpoint}"',
        *(f'[[neurons]]\nname = "{name}"\nendpoint = "{node.url}"' for name, node in nodes.items()),
        as_toml(KEY.section),
    ]
    (folder / "cortex.toml").write_text("\n".join(lines))
    fleet = Fleet(folder, port, start_node, nodes)
    fleet.start()
    yield fleet
    fleet.kill()


def loads(fleet: Fleet) -> list[tuple[int, int, float]]:
    """What runs and waits in the engine of each living node, and the fraction of its pages in use."""
    found = [node.model(WIDE)["load"] for node in fleet.nodes.values() if node.process.poll() is None]
    return [(load["running"], load["waiting"], load["kv_used_fraction"]) for load in found]


def is_free(fleet: Fleet) -> bool:
    return all(load == (0, 0, 0.0) for load in loads(fleet))


def ask_node(node: Daemon, **fields: Any) -> Conversation:
    """A streamed response of a node, not through the gateway."""
    body = {"model": WIDE, "prompt": "Once upon a time", "ignore_eos": True, "stream": True, **fields}
    return Conversation(int(node.url.rpartition(":")[2]), "/v1/completions", json.dumps(body).encode(), "direct/1")


def counted(fleet: Fleet, name: str) -> float:
    """What the nodes themselves have counted, all together."""
    total = 0.0
    for node in fleet.nodes.values():
        with urllib.request.urlopen(f"{node.url}/metrics", timeout=WAIT_S) as response:
            lines = response.read().decode().splitlines()
        total += sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))
    return total


CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


def test_one_trace_and_one_id_from_the_client_to_the_engine(fleet: Fleet, collector: Collector) -> None:
    response = fleet.ask(CHAT, messages=[{"role": "user", "content": "hi"}], max_tokens=4)
    assert b"\r\nx-request-id: e2e/1\r\n" in response.read()

    def trace() -> list[ReceivedSpan]:
        return [span for span in collector.spans if span.trace_id == TRACE_ID]

    wanted_spans = {("cortex", f"POST {CHAT}"), ("neuron", f"POST {CHAT}"), ("neuron", "prefill"), ("neuron", "decode")}
    wait_until(lambda: wanted_spans <= {(span.service, span.name) for span in trace()})
    by_id = {span.span_id: span for span in trace()}
    decode = next(span for span in trace() if span.name == "decode")
    path = [decode]
    while path[-1].parent_id in by_id:
        path.append(by_id[path[-1].parent_id])
    assert [span.service for span in path] == ["neuron", "neuron", "cortex", "cortex"]
    assert path[-1].parent_id == SPAN_ID, "the client's own span is the root"
    for log in (fleet.log, *(node.log.read_text() for node in fleet.nodes.values())):
        lines = [json.loads(line) for line in log.splitlines()]
        assert lines, "every line of every program is JSON"
    wanted = [json.loads(line) for line in fleet.log.splitlines() if '"e2e/1"' in line]
    assert [(line["message"], line["request_id"], line["completion_tokens"]) for line in wanted] == [
        ("request", "e2e/1", 4)
    ]
    served = [line for node in fleet.nodes.values() for line in node.log.read_text().splitlines() if '"e2e/1"' in line]
    assert any(CHAT in json.loads(line)["message"] for line in served)


def test_turns_of_an_agent_stay_on_their_node_until_it_is_saturated(fleet: Fleet) -> None:
    messages = [{"role": "system", "content": "You are an agent. " + WORDS * 18}]

    def turn(number: int) -> tuple[str, float]:
        """The node that served the next turn, and the fraction of the prompt that it had cached."""
        messages.append({"role": "user", "content": f"Go on: {number}."})
        head, _, body = fleet.ask(CHAT, messages=messages, max_tokens=2, ignore_eos=True).read().partition(b"\r\n\r\n")
        response = json.loads(body)
        messages.append(response["choices"][0]["message"])
        usage = response["usage"]
        (node,) = [line for line in head.decode().splitlines() if line.startswith("x-cortex-node: ")]
        return node.partition(": ")[2], usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"]

    (first, _), *later = [turn(number) for number in range(4)]
    assert [node for node, _ in later] == [first] * 3
    assert all(cached > 0.8 for _, cached in later), later

    node = fleet.nodes[first]
    others = [ask_node(node, max_tokens=4000) for _ in range(5 * MAX_RUNNING)]

    def model_on(name: str) -> Any:
        (status,) = [each for each in fleet.get("/fleet/status")["nodes"] if each["name"] == name]
        return next(model for model in status["models"] if model["id"] == WIDE)

    wait_until(lambda: model_on(first)["load"]["waiting"] >= 3 * MAX_RUNNING)
    assert turn(4)[0] != first, "the other node serves it"
    for other in others:
        other.leave()
    wait_until(lambda: is_free(fleet))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_client_disconnected_from_the_gateway_frees_the_engine_before_half_its_work_is_done(
    fleet: Fleet, phase: str, stream: bool
) -> None:
    prompt = LONG_PROMPT if phase == "prefill" else "Once upon a time"
    max_tokens, whole_steps = (1, PROMPT_STEPS) if phase == "prefill" else (1500, 1500)
    asked = fleet.ask("/v1/completions", prompt=prompt, max_tokens=max_tokens, ignore_eos=True, stream=stream)
    wait_until(lambda: any(running + waiting for running, waiting, _ in loads(fleet)))
    if phase == "decode" and stream:
        asked.read_until(b"data: ")
    steps_before = counted(fleet, "neuron_engine_steps_total")
    asked.leave()
    wait_until(lambda: is_free(fleet))
    assert counted(fleet, "neuron_engine_steps_total") - steps_before < whole_steps / 2
    wait_until(lambda: not fleet.in_flight())


def test_disconnected_client_leaves_the_queue_of_a_node_while_others_are_served(fleet: Fleet) -> None:
    node = fleet.nodes["one"]

    def load() -> tuple[int, int]:
        return loads(fleet)[0][:2]

    others = [ask_node(node, max_tokens=4000) for _ in range(MAX_RUNNING)]
    for other in others:
        other.read_until(b"data: ")
    queued = ask_node(node, max_tokens=4)
    wait_until(lambda: load() == (MAX_RUNNING, 1))
    queued.leave()
    wait_until(lambda: load() == (MAX_RUNNING, 0))
    for other in others:
        other.leave()
    wait_until(lambda: is_free(fleet))


def test_disconnected_client_is_charged_for_what_was_computed_and_usage_survives_a_kill(fleet: Fleet) -> None:
    fields = {"prompt": "Once upon a time there was", "ignore_eos": True}
    whole = json.loads(fleet.ask("/v1/completions", **fields).read().partition(b"\r\n\r\n")[2])
    wait_until(lambda: fleet.usage()["requests"] == fleet.num_asked)
    before, tokens_before = fleet.usage(), counted(fleet, "neuron_completion_tokens_total")
    asked = fleet.ask("/v1/completions", **fields, max_tokens=1500, stream=True)
    asked.read_until(b"data: ")
    asked.leave()
    wait_until(lambda: fleet.usage()["requests"] == fleet.num_asked)
    after = fleet.usage()
    assert after["prompt_tokens"] - before["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    produced = counted(fleet, "neuron_completion_tokens_total") - tokens_before
    assert after["completion_tokens"] - before["completion_tokens"] == produced > 0
    fleet.kill()
    fleet.start()
    assert fleet.usage() == after


NUM_LINES = 16
NUM_TOKENS = 24
"""Of one response of a batch: none ends by itself."""


def line(number: int) -> dict[str, Any]:
    body = {"model": WIDE, "prompt": f"number {number}", "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body}


def test_every_line_of_a_batch_has_one_result_although_gateway_and_node_are_killed(fleet: Fleet) -> None:
    def used() -> Any:
        return fleet.get("/fleet/usage?by=key")["rows"][0]

    before = used()
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{fleet.port}/v1", api_key=KEY.text, max_retries=0, timeout=WAIT_S
    )
    content = "".join(json.dumps(line(number)) + "\n" for number in range(NUM_LINES)).encode()
    file = client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")
    id = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h").id

    def wait_for(num_lines: int) -> Any:
        def reached() -> Any:
            batch = client.batches.retrieve(id)
            assert batch.request_counts is not None
            is_enough = batch.request_counts.completed >= num_lines
            return batch if is_enough and (num_lines < NUM_LINES or batch.status == "completed") else None

        return wait_until(reached, "the batch does not go on")

    wait_for(1)
    fleet.kill()
    fleet.start()
    wait_for(NUM_LINES // 3)
    node = fleet.nodes["one"]
    node.process.kill()
    batch = wait_for(NUM_LINES)

    found = [json.loads(each) for each in client.files.content(batch.output_file_id).read().splitlines()]
    assert sorted(each["custom_id"] for each in found) == sorted(f"line-{number}" for number in range(NUM_LINES))
    after = used()
    assert after["requests"] - before["requests"] == NUM_LINES
    assert after["completion_tokens"] - before["completion_tokens"] == sum(
        each["response"]["body"]["usage"]["completion_tokens"] for each in found
    )
    fleet.num_asked += NUM_LINES
    node.process.wait(WAIT_S)
    fleet.nodes["one"] = fleet.start_node(node.url.removeprefix("http://"))
    wait_until(lambda: all(map(fleet.is_ready, fleet.nodes)))


def test_request_moves_if_its_node_is_killed_before_the_first_token_and_fails_with_an_event_after_it(
    fleet: Fleet,
) -> None:
    wait_until(lambda: is_free(fleet))
    workers = {name: node.process_called("neuron-worker") for name, node in fleet.nodes.items()}
    for worker in workers.values():
        os.kill(worker, signal.SIGSTOP)  # no token comes before its node is killed
    asked = fleet.ask("/v1/completions", prompt="Once upon a time", max_tokens=2, stream=True)
    (name,) = wait_until(fleet.in_flight)
    first = fleet.nodes[name].process
    first.send_signal(signal.SIGSTOP)  # it holds the request and says nothing
    asked.read_until(b": keepalive")
    first.send_signal(signal.SIGKILL)
    for other in workers.keys() - {name}:
        os.kill(workers[other], signal.SIGCONT)
    response = asked.read()
    assert b"data: [DONE]" in response, response
    assert b"error" not in response

    streams = [
        fleet.ask(CHAT, messages=[{"role": "user", "content": "Tell me a story."}], max_tokens=1500, stream=True),
        fleet.ask(MESSAGES, messages=[{"role": "user", "content": "Tell me a story."}], max_tokens=1500, stream=True),
    ]
    for stream in streams:
        stream.read_until(b'"content":"' if stream is streams[0] else b"content_block_delta")
    (second,) = [node for node in fleet.nodes.values() if node.process.poll() is None]
    second.process.send_signal(signal.SIGKILL)
    chat, messages = (stream.read() for stream in streams)
    assert b'"code":"upstream_interrupted"' in chat
    assert b"[DONE]" not in chat.partition(b"upstream_interrupted")[0]
    assert b"event: error\ndata: " in messages
    assert b"message_stop" not in messages
    wait_until(lambda: not any(node["up"] for node in fleet.get("/fleet/status")["nodes"]))
    rejected = fleet.ask(CHAT, messages=[{"role": "user", "content": "hi"}]).read()
    assert rejected.startswith(b"HTTP/1.1 50"), rejected
