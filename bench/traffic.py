"""Benchmarks a server under the traffic of people and agents, over HTTP: any server with OpenAI's chat completions.

    python bench/traffic.py --url http://127.0.0.1:8000 --model MODEL --json traffic.json
    python bench/traffic.py --url … --model … --workloads arrivals --rates 4,8,16,32 --seconds 60

arrivals  Poisson arrivals at each rate, log-normal lengths (medians about 400 tokens in, 150 out), sampled; one in four
          has a JSON schema to follow
long      8,192 tokens in and 1,024 out, at each of `--concurrency`
agents    conversations that grow by a tool's result each turn, with tools, and whose requests have more than 50 times
          as many tokens in as out; they begin at random

Arrivals and agents are open loop: a request is due at its time, whatever the server does, and its time to the first
token counts from then. A workload runs `--runs` times with fixed seeds; the table shows the median run and the range.
Prompts are random words, unlike each other from the first word on. How many words make a token is measured with one
request, and the tokens that the server reports are what counts.

Requests are sent by `--processes` of this program, which needs no package. It reports its own lag: how much later than
due requests were sent, and how late its event loop was. If that is not small against the times of the server, use more
processes or another machine. `good` is the share of requests within `--ttft-ms` and `--tpot-ms`.

With `--weight-gb` and `--limits TB/s,TFLOP/s` the table has shares of the limit: the time in which the device reads the
weights once over the time per output token, and that in which it multiplies all tokens with `--billions` of weights
over the length of the run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import ssl
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from workloads import arriving_requests, percentile

LONG_TOKENS, LONG_RESPONSE = 8192, 1024
AGENT_START, AGENT_RESPONSE = 3000, 40
"""Tokens of the first prompt and of a response."""
AGENT_RESULT = (5.3, 0.8)
"""The log-normal length of a tool's result: median 200 tokens."""
AGENT_PAUSE_S = 0.5
"""A tool takes this long, on average."""
CALIBRATION_WORDS = 120
START_DELAY_S = 0.5
"""Time for all processes to get ready."""
TICK_S = 0.01
SAMPLING = {"temperature": 0.7, "top_p": 0.9}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "person",
        "schema": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 40},
                "age": {"type": "integer"},
                "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 5},
            },
            "required": ["name", "age", "tags"],
            "additionalProperties": False,
        },
    },
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Use this to {name.replace('_', ' ')}.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
    for name in ("read_file", "write_file", "list_folder", "run_tests")
]
PERCENTILES = (0.5, 0.9, 0.99)


# -- one request -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    model: str
    key: str = ""
    words_per_token: float = 1.0

    def request(self, body: dict[str, Any]) -> bytes:
        """Bytes of a streamed chat completion."""
        place = urlsplit(self.url)
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        content = json.dumps({"model": self.model, **body, **stream}).encode()
        key = f"authorization: Bearer {self.key}\r\n" if self.key else ""
        path = f"{place.path.rstrip('/').removesuffix('/v1')}/v1/chat/completions"
        head = f"POST {path} HTTP/1.1\r\nhost: {place.netloc}\r\n{key}content-type: application/json\r\n"
        return f"{head}content-length: {len(content)}\r\nconnection: close\r\n\r\n".encode() + content

    def words(self, draw: random.Random, tokens: int) -> str:
        """A text of about as many tokens, as no other."""
        count = max(1, round(tokens * self.words_per_token))
        return " ".join(draw.choices(_WORDS, k=count))


@dataclass(slots=True)
class Record:
    """What the client saw of one request. Times are seconds of the monotonic clock."""

    due_s: float
    kind: str = "text"
    sent_s: float = 0.0
    events_s: list[float] = field(default_factory=list)
    """When an event with a part of the response arrived."""
    end_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def first_s(self) -> float:
        return self.events_s[0] - self.due_s

    @property
    def token_s(self) -> float:
        """Time per output token after the first."""
        return (self.events_s[-1] - self.events_s[0]) / max(1, self.completion_tokens - 1)


class _Exchange(asyncio.Protocol):
    """Sends a request, and reads its stream of events as the bytes come."""

    def __init__(self, request: bytes, record: Record) -> None:
        self._request = request
        self._record = record
        self._head: bytes | None = b""
        self._is_chunked = False
        self._raw = b""
        """The part of a chunked body that is not yet a whole chunk."""
        self._body = b""
        self._status = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._record.sent_s = time.monotonic()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now_s = time.monotonic()
        if self._head is not None:
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            self._head = None
            self._status = int(head.split(b" ", 2)[1])
            self._is_chunked = b"transfer-encoding: chunked" in head.lower()
        self._body += self._unchunked(data) if self._is_chunked else data
        if self._status == 200:
            *events, self._body = self._body.replace(b"\r\n", b"\n").split(b"\n\n")
            for event in events:
                self._take(event, now_s)

    def _unchunked(self, data: bytes) -> bytes:
        self._raw, content = self._raw + data, []
        while (end := self._raw.find(b"\r\n")) >= 0:
            size = int(self._raw[:end].split(b";")[0], 16)
            if len(self._raw) < end + 2 + size + 2:
                break
            content.append(self._raw[end + 2 : end + 2 + size])
            self._raw = self._raw[end + 2 + size + 2 :]
        return b"".join(content)

    def _take(self, event: bytes, now_s: float) -> None:
        data = b"".join([line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")])
        if not data or data == b"[DONE]":
            return
        record, message = self._record, json.loads(data)
        if "error" in message:
            record.error = json.dumps(message["error"])[:300]
        if usage := message.get("usage"):
            record.prompt_tokens, record.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        for choice in message.get("choices") or ():
            delta = choice.get("delta") or {}
            text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
            if text or delta.get("tool_calls"):
                record.text += text
                record.events_s.append(now_s)

    def connection_lost(self, exc: Exception | None) -> None:
        record = self._record
        record.end_s = time.monotonic()
        if self._status != 200:
            record.error = f"{self._status} {self._body[:300].decode(errors='replace')}"
        elif exc is not None or not record.completion_tokens:
            record.error = record.error or f"the stream ended early: {exc}"
        if not self.done.done():
            self.done.set_result(None)


async def exchange(server: Server, body: dict[str, Any], record: Record) -> Record:
    """Sends one request now, and returns its record when the response has ended."""
    place = urlsplit(server.url)
    is_https = place.scheme == "https"
    address = (place.hostname or "127.0.0.1", place.port or (443 if is_https else 80))
    context = ssl.create_default_context() if is_https else None
    request = server.request(body)
    try:
        _, protocol = await asyncio.get_running_loop().create_connection(
            lambda: _Exchange(request, record), *address, ssl=context
        )
        await protocol.done
    except OSError as error:
        record.error, record.end_s = str(error), time.monotonic()
    return record


# -- workloads ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Task:
    """What one client does: its requests follow each other."""

    due_s: float
    """Seconds after the start."""
    kind: str
    seed: int
    prompt_tokens: int
    response_tokens: int
    num_turns: int = 1
    """Turns of an agent, or requests of another client, each with a new prompt."""

    def first_body(self, server: Server, turn: int) -> dict[str, Any]:
        """The body of a request that continues nothing."""
        draw = random.Random(self.seed * 1009 + turn)
        content = server.words(draw, self.prompt_tokens)
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": self.response_tokens, **SAMPLING}
        if self.kind == "json":
            return {**body, "response_format": SCHEMA}
        return {**body, "ignore_eos": True}


def arrival_tasks(per_s: float, seconds: float, json_share: float, seed: int) -> list[Task]:
    draw = random.Random(f"arrivals {per_s} {seed}")
    return [
        Task(at_s, "json" if draw.random() < json_share else "text", draw.getrandbits(40), *lengths)
        for at_s, *lengths in arriving_requests(per_s, seconds, seed)
    ]


def long_tasks(concurrency: int, requests: int, seed: int) -> list[Task]:
    """`requests` of each client, one after the other."""
    draw = random.Random(f"long {concurrency} {seed}")
    return [Task(0.0, "text", draw.getrandbits(40), LONG_TOKENS, LONG_RESPONSE, requests) for _ in range(concurrency)]


def agent_tasks(count: int, turns: int, seconds: float, seed: int) -> list[Task]:
    """Conversations of `turns` requests that begin within the first half of `seconds`."""
    draw, at_s, tasks = random.Random(f"agents {count} {seed}"), 0.0, []
    for _ in range(count):
        tasks.append(Task(at_s, "agent", draw.getrandbits(40), AGENT_START, AGENT_RESPONSE, turns))
        at_s += draw.expovariate(2 * count / seconds)
    return tasks


async def _act(server: Server, task: Task, start_s: float) -> list[Record]:
    """All requests of a task."""
    records: list[Record] = []
    draw, due_s = random.Random(task.seed), start_s + task.due_s
    body = {**task.first_body(server, 0), **({"tools": TOOLS} if task.kind == "agent" else {})}
    for turn in range(task.num_turns):
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        record = await exchange(server, body, Record(due_s, task.kind))
        records.append(record)
        if record.error:
            return records
        if task.kind == "agent":
            due_s = record.end_s + draw.expovariate(1 / AGENT_PAUSE_S)
            result = server.words(draw, int(draw.lognormvariate(*AGENT_RESULT)))
            turns = [{"role": "assistant", "content": record.text or "."}, {"role": "user", "content": result}]
            body["messages"] += turns
        else:
            due_s, body = record.end_s, task.first_body(server, turn + 1)
    return records


# -- processes ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Ran:
    """What one process or all of them did."""

    records: list[Record]
    loop_lags_s: list[float]
    """By how much the event loop was late."""
    cpu_shares: list[float]
    """CPU time over the time of the run, of each process."""


def run_tasks(server: Server, tasks: Sequence[Task], start_s: float) -> Ran:
    """Runs tasks in this process; `start_s` is a time of the monotonic clock, which all processes share."""

    async def run() -> Ran:
        lags: list[float] = []

        async def watch() -> None:
            while True:
                due_s = time.monotonic() + TICK_S
                await asyncio.sleep(TICK_S)
                lags.append(time.monotonic() - due_s)

        watching = asyncio.create_task(watch())
        began_s, used_s = time.monotonic(), time.process_time()
        found = await asyncio.gather(*(_act(server, task, start_s) for task in tasks))
        watching.cancel()
        cpu_share = (time.process_time() - used_s) / max(1e-9, time.monotonic() - began_s)
        return Ran([record for records in found for record in records], lags, [cpu_share])

    return asyncio.run(run())


def run_processes(server: Server, tasks: Sequence[Task], processes: int) -> Ran:
    """Runs tasks in several processes, each of which has every so-manyth of them."""
    if processes == 1:
        return run_tasks(server, tasks, time.monotonic())
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for _ in pool.map(abs, range(processes)):
            pass  # they have started
        start_s = time.monotonic() + START_DELAY_S
        parts = [pool.submit(run_tasks, server, tasks[index::processes], start_s) for index in range(processes)]
        ran = [part.result() for part in parts]
    return Ran(*([item for part in ran for item in getattr(part, name)] for name in Ran.__slots__))


# -- results -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a good response keeps to, and the limits of the device, where they are known."""

    ttft_ms: float
    tpot_ms: float
    weight_gb: float | None = None
    billions: float | None = None
    tb_per_s: float = 0.0
    tflops: float = 0.0


def figures(ran: Ran, bounds: Bounds) -> dict[str, float]:
    """The figures of one run, by name. Times are in milliseconds."""
    good = [record for record in ran.records if not record.error and record.events_s]
    found: dict[str, float] = {"requests": len(ran.records), "errors": len(ran.records) - len(good)}
    if not good:
        return found
    seconds = max(record.end_s for record in good) - min(record.due_s for record in good)
    num_in, num_out = (sum(getattr(each, name) for each in good) for name in ("prompt_tokens", "completion_tokens"))
    num_cached = sum(record.cached_tokens for record in good)
    gaps = [late - early for each in good for early, late in zip(each.events_s, each.events_s[1:], strict=False)]
    found |= {"s": seconds, "tok/s": num_out / seconds, "in tok/s": num_in / seconds, "cached": num_cached / num_in}
    found |= _percentiles("TTFT", [record.first_s for record in good])
    found |= _percentiles("TPOT", [record.token_s for record in good if record.completion_tokens > 1])
    found |= _percentiles("gap", gaps)
    found |= _percentiles("end", [record.end_s - record.due_s for record in good])
    for kind in sorted({record.kind for record in good} - {"text"}):
        found |= _percentiles(f"TTFT {kind}", [record.first_s for record in good if record.kind == kind])
    kept = [each for each in good if each.first_s * 1e3 <= bounds.ttft_ms and each.token_s * 1e3 <= bounds.tpot_ms]
    found |= {"good": len(kept) / len(ran.records), "good/s": len(kept) / seconds}
    found["send lag p99"] = percentile([record.sent_s - record.due_s for record in good], 0.99) * 1e3
    found["loop lag p99"] = percentile(ran.loop_lags_s, 0.99) * 1e3
    found["client CPU"] = max(ran.cpu_shares)
    if bounds.weight_gb and bounds.tb_per_s:
        found["TPOT of limit"] = bounds.weight_gb / bounds.tb_per_s / found["TPOT p50"]
    if bounds.billions and bounds.tflops:
        found["compute of limit"] = 2e-3 * bounds.billions * (num_in - num_cached + num_out) / bounds.tflops / seconds
    return found


def _percentiles(name: str, seconds: Iterable[float]) -> dict[str, float]:
    times = list(seconds)
    return {f"{name} p{share * 100:g}": percentile(times, share) * 1e3 for share in PERCENTILES} if times else {}


def median_run(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """The run whose time to the first token is the median."""
    return sorted(runs, key=lambda run: run.get("TTFT p50", float("inf")))[len(runs) // 2]


TABLE = "requests", "errors", "tok/s", "TTFT p50", "TTFT p99", "TPOT p50", "gap p50", "gap p99", "end p50", "good"
CLIENT = "send lag p99", "loop lag p99", "client CPU"


def table(results: dict[str, list[dict[str, float]]]) -> Iterator[str]:
    """A line for each workload: the median run, and the range of some figures over the runs."""
    width = max(map(len, results), default=0)
    shares = [name for name in ("TPOT of limit", "compute of limit") if any(name in run[0] for run in results.values())]
    yield f"{'':{width}} " + " ".join(f"{name:>12}" for name in (*TABLE, *shares, *CLIENT))
    for name, runs in results.items():
        run = median_run(runs)
        cells = [f"{_cell(run.get(column)):>12}" for column in (*TABLE, *shares, *CLIENT)]
        spread = [run["TTFT p99"] for run in runs if "TTFT p99" in run]
        ranged = f"   TTFT p99 {min(spread):,.0f} to {max(spread):,.0f}" if len(spread) > 1 else ""
        yield f"{name:{width}} " + " ".join(cells) + ranged


def _cell(figure: float | None) -> str:
    if figure is None:
        return "–"
    return f"{figure:,.0f}" if figure >= 1000 or figure == int(figure) else f"{figure:.2f}"


# -- the program -------------------------------------------------------------------------------------------------------


async def calibrated(server: Server) -> Server:
    """The server with the words of a token of its tokenizer. An error response ends the program."""
    probe = Task(0.0, "text", 1, CALIBRATION_WORDS, 1)
    few, many = (replace(probe, prompt_tokens=count) for count in (1, CALIBRATION_WORDS + 1))
    counts = []
    for task in (few, many):
        record = await exchange(server, task.first_body(server, 0), Record(time.monotonic()))
        if record.error:
            sys.exit(f"{server.url}: {record.error}")
        counts.append(record.prompt_tokens)
    return replace(server, words_per_token=CALIBRATION_WORDS / max(1, counts[1] - counts[0]))


def workloads(options: argparse.Namespace, seed: int) -> Iterator[tuple[str, list[Task]]]:
    names = options.workloads.split(",")
    if "arrivals" in names:
        for per_s in map(float, options.rates.split(",")):
            yield f"arrivals {per_s:g}/s", arrival_tasks(per_s, options.seconds, options.json_share, seed)
    if "long" in names:
        for count in map(int, options.concurrency.split(",")):
            yield f"long x{count}", long_tasks(count, options.long_requests, seed)
    if "agents" in names:
        yield f"agents x{options.agents}", agent_tasks(options.agents, options.agent_turns, options.seconds, seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--key-env", help="the environment variable with the key")
    parser.add_argument("--workloads", default="arrivals,long,agents")
    parser.add_argument("--rates", default="4,8,16,32", help="arrivals per second")
    parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals")
    parser.add_argument("--json-share", type=float, default=0.25, help="of arrivals that have a JSON schema")
    parser.add_argument("--concurrency", default="1,8,64,256", help="of long prompts")
    parser.add_argument("--long-requests", type=int, default=2, help="of each client, one after the other")
    parser.add_argument("--agents", type=int, default=32)
    parser.add_argument("--agent-turns", type=int, default=12, help="requests of each agent, one after the other")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=5, help="of the first run; each further one has the next")
    parser.add_argument("--processes", type=int, default=max(1, min(4, (os.cpu_count() or 2) // 2)))
    parser.add_argument("--ttft-ms", type=float, default=200.0)
    parser.add_argument("--tpot-ms", type=float, default=30.0)
    parser.add_argument("--weight-gb", type=float, help="bytes of weights that a token reads")
    parser.add_argument("--billions", type=float, help="weights that a token is multiplied with")
    parser.add_argument("--limits", default="0,0", help="TB/s,TFLOP/s of the device")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    key = os.environ[options.key_env] if options.key_env else ""
    server = asyncio.run(calibrated(Server(options.url, options.model, key)))
    limits = [float(limit) for limit in options.limits.split(",")]
    bounds = Bounds(options.ttft_ms, options.tpot_ms, options.weight_gb, options.billions, *limits)
    results: dict[str, list[dict[str, float]]] = {}
    for run in range(options.runs):
        for name, tasks in workloads(options, options.seed + run):
            ran = run_processes(server, tasks, options.processes)
            results.setdefault(name, []).append(figures(ran, bounds))
            for error in sorted({record.error for record in ran.records if record.error})[:3]:
                print(f"{name}: {error}", file=sys.stderr)
    print(f"{options.url}, {options.model}, {server.words_per_token:.2f} words per token, {options.runs} runs; ms")
    print("\n".join(table(results)))
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name not in ("json", "key_env")}
        report = {"settings": settings, "bounds": asdict(bounds), "results": results}
        options.json.write_text(json.dumps(report, indent=1))
    return 0


_SYLLABLES = ("ba", "co", "di", "fu", "ge", "hi", "jo", "ka", "le", "mi", "no", "pu", "ra", "se", "ti", "vo")
_WORDS = [first + second + third for first in _SYLLABLES for second in _SYLLABLES for third in ("n", "s", "rt", "")]

if __name__ == "__main__":
    sys.exit(main())
