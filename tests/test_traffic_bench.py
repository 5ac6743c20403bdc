"""The benchmark of traffic against a server whose times are known, and what it makes of records."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[1] / "bench"
FIRST_S, GAP_S, NUM_TOKENS = 0.05, 0.01, 5


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    return import_module("traffic")


class ScriptedServer:
    """Responds with one event a token at fixed times, and keeps when it wrote them. Tokens of a prompt are its words
    and four more."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.written_s: list[list[float]] = []
        self.port = 0

    async def serve(self, started: threading.Event) -> None:
        server = await asyncio.start_server(self._respond, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        await asyncio.Event().wait()

    async def _respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        body = json.loads(await reader.readexactly(size))
        self.bodies.append(body)
        if body["messages"][-1]["content"] == "fail":
            writer.write(b"HTTP/1.1 503 Busy\r\ncontent-length: 5\r\n\r\nlater")
            writer.close()
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        written: list[float] = []
        index = len(self.written_s)
        self.written_s.append(written)
        num_prompt = 4 + sum(len(message["content"].split()) for message in body["messages"])
        num_tokens = min(body["max_tokens"], NUM_TOKENS)
        for number in range(num_tokens):
            await asyncio.sleep(GAP_S if number else FIRST_S)
            written.append(time.monotonic())
            self._write(writer, {"choices": [{"delta": {"content": f"{index} "}}]})
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens}
        self._write(writer, {"choices": [], "usage": usage})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        writer.close()

    def _write(self, writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
        """In two chunks, which end inside the event."""
        event = b"data: " + json.dumps(message).encode() + b"\n\n"
        for part in (event[:9], event[9:]):
            writer.write(b"%x\r\n%s\r\n" % (len(part), part))


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    scripted, started, loop = ScriptedServer(), threading.Event(), asyncio.new_event_loop()
    serving = loop.create_task(scripted.serve(started))

    def run() -> None:
        try:
            loop.run_until_complete(serving)
        except asyncio.CancelledError:
            loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(60)
    yield scripted
    loop.call_soon_threadsafe(serving.cancel)
    thread.join(60)


def test_times_are_those_of_the_server(traffic: Any, server: ScriptedServer) -> None:
    target = asyncio.run(traffic.calibrated(traffic.Server(f"http://127.0.0.1:{server.port}", "m")))
    assert target.words_per_token == 1.0
    server.written_s.clear()
    tasks = traffic.arrival_tasks(40, 0.5, 0.25, seed=1)
    ran = traffic.run_processes(target, tasks, 1)
    assert len(ran.records) == 20
    assert not any(record.error for record in ran.records)
    for record in ran.records:
        times = server.written_s[int(record.text.split()[0])]
        assert record.due_s <= record.sent_s <= times[0]
        assert record.completion_tokens == len(record.events_s) == len(times)
        assert all(seen_s >= at_s for seen_s, at_s in zip(record.events_s, times, strict=True))
        assert record.first_s >= FIRST_S - 0.005
    kinds = [record.kind for record in ran.records]
    schemas = [body for body in server.bodies if "response_format" in body]
    assert 0 < len(schemas) == kinds.count("json") < 20


def test_arrivals_do_not_wait_for_responses(traffic: Any, server: ScriptedServer) -> None:
    target = traffic.Server(f"http://127.0.0.1:{server.port}", "m")
    tasks = [traffic.Task(0.0, "text", seed, 3, 5) for seed in range(30)]
    records = traffic.run_tasks(target, tasks, time.monotonic()).records
    first_end_s = min(record.end_s for record in records)
    assert sum(record.sent_s < first_end_s for record in records) > 1
    assert len({body["messages"][0]["content"] for body in server.bodies}) == 30, "no prompt is cached"


def test_agent_sends_a_conversation_that_grows(traffic: Any, server: ScriptedServer) -> None:
    target = traffic.Server(f"http://127.0.0.1:{server.port}", "m")
    task = traffic.Task(0.0, "agent", 7, 3000, 2, num_turns=3)
    records = traffic.run_tasks(target, [task], time.monotonic()).records
    assert [len(body["messages"]) for body in server.bodies] == [1, 3, 5]
    assert all(body["tools"] == traffic.TOOLS for body in server.bodies)
    assert server.bodies[2]["messages"][:3] == server.bodies[1]["messages"]
    assert all(record.prompt_tokens > 50 * record.completion_tokens for record in records)


def test_errors_are_counted_and_told(traffic: Any, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    target = traffic.Server(f"http://127.0.0.1:{server.port}", "m")
    monkeypatch.setattr(traffic.Server, "words", lambda *_: "fail")
    ran = traffic.run_tasks(target, [traffic.Task(0.0, "text", 1, 3, 5)], time.monotonic())
    assert [record.error for record in ran.records] == ["503 later"]
    assert traffic.figures(ran, traffic.Bounds(1, 1)) == {"requests": 1, "errors": 1}
    (failed,) = traffic.run_tasks(
        traffic.Server("http://127.0.0.1:1", "m"), [traffic.Task(0, "text", 1, 1, 1)], 0
    ).records
    assert "Connect" in failed.error


def test_figures_of_known_records(traffic: Any) -> None:
    records = [
        traffic.Record(due, "text", due + 0.002, [due + wait + 0.01 * token for token in range(11)], due + wait + 0.1)
        for due, wait in ((0.0, 0.1), (1.0, 0.3))
    ]
    for record in records:
        record.prompt_tokens, record.completion_tokens, record.cached_tokens = 1000, 11, 500
    bounds = traffic.Bounds(ttft_ms=200, tpot_ms=20, weight_gb=16, billions=8, tb_per_s=4, tflops=400)
    found = traffic.figures(traffic.Ran(records, [0.001], [0.5]), bounds)
    expected = {"tok/s": 22 / 1.4, "TTFT p50": 300, "TPOT p50": 10, "gap p99": 10, "end p99": 400, "cached": 0.5}
    expected |= {"good": 0.5, "good/s": 1 / 1.4, "send lag p99": 2, "loop lag p99": 1, "client CPU": 0.5}
    expected |= {"TPOT of limit": 0.4, "compute of limit": 2e-3 * 8 * 1022 / 400 / 1.4}
    for name, figure in expected.items():
        assert found[name] == pytest.approx(figure), name
    head, row = traffic.table({"arrivals": [found, found, found]})
    assert "TPOT of limit" in head
    assert row.startswith("arrivals")


def test_program_writes_all_runs(
    traffic: Any,
    server: ScriptedServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report, url = tmp_path / "traffic.json", f"http://127.0.0.1:{server.port}"
    options = ["--rates", "20", "--seconds", "0.2", "--concurrency", "2", "--long-requests", "1"]
    program = ["traffic.py", "--url", url, "--model", "m", "--json", str(report), "--runs", "2", "--processes", "1"]
    options += ["--agents", "1", "--agent-turns", "2"]
    monkeypatch.setattr(sys, "argv", [*program, *options])
    assert traffic.main() == 0
    results = json.loads(report.read_text())["results"]
    assert [(name, [run["requests"] for run in runs]) for name, runs in results.items()] == [
        ("arrivals 20/s", [4, 4]),
        ("long x2", [2, 2]),
        ("agents x1", [2, 2]),
    ]
    assert all(run["errors"] == 0 and run["tok/s"] > 0 for runs in results.values() for run in runs)
    assert "agents x1" in capsys.readouterr().out


def test_several_processes_share_the_tasks(
    traffic: Any, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(BENCH))
    target = traffic.Server(f"http://127.0.0.1:{server.port}", "m")
    ran = traffic.run_processes(target, traffic.arrival_tasks(20, 0.3, 0.0, seed=1), 2)
    assert len(ran.records) == 6
    assert len(ran.cpu_shares) == 2
    assert not any(record.error for record in ran.records)


def test_no_two_workloads_have_a_prompt_in_common(traffic: Any) -> None:
    tasks = [
        *traffic.arrival_tasks(4, 5, 0.25, seed=5),
        *traffic.arrival_tasks(8, 5, 0.25, seed=5),
        *traffic.long_tasks(1, 1, seed=5),
        *traffic.long_tasks(8, 1, seed=5),
        *traffic.agent_tasks(8, 2, 5, seed=5),
    ]
    assert len({task.seed for task in tasks}) == len(tasks)
