"""A soak: mixed traffic on a gateway and two nodes, with swaps, cancelled requests and faults, for an hour.

    make soak                # an hour
    make soak MINUTES=10

Every half minute something fails: a worker is killed, a node is started again, or a node hangs for a while. At the end
memory, descriptors and threads of the gateway and of a node, and the latency of ready models, must be flat, and the
ledger must equal what the clients counted, to the token. The exit status is 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from cortex.gateway.ledger.keys import generate

from .flatness import Bound, Reading, compared, growth
from .programs import CHAT_MODELS, EMBEDDER, write_programs
from .traffic import Traffic

SAMPLE_S = 2.0
FAULT_S = 30.0
HANG_S = 8.0
SETTLE_S = 90.0
"""How long the ledger may take until the usage of cancelled requests is known."""
WINDOW_S = 15.0
"""Latencies are compared as medians of this long, each against a fixed computation in the same time: what else the
machine does is not a fault of the programs."""
YARDSTICK_STEPS = 100_000
BOUNDS = {
    "memory": Bound("memory", "MB", most=16.0, most_part=0.08),
    "descriptors": Bound("descriptors", "", most=6.0),
    "threads": Bound("threads", "", most=2.0),
}
LATENCY = Bound("latency", "ms", most=25.0, most_part=0.35)


class Soak:
    def __init__(self, folder: Path, minutes: float, seed: int) -> None:
        self.chance = random.Random(seed)
        self.admin = generate("admin", operator=True)
        self.client, self.canceller = generate("client"), generate("canceller")
        self.gateway, self.nodes = write_programs(folder, (self.admin, self.client, self.canceller))
        self.seconds = 60.0 * minutes
        self.readings: dict[tuple[str, str], list[Reading]] = {}
        self.yardsticks: list[Reading] = []
        self.faults: Counter[str] = Counter()
        self.traffic = Traffic(self.gateway.url, self.client.text, self.canceller.text, random.Random(seed + 1))

    async def run(self) -> bool:
        programs = (self.gateway, *self.nodes.values())
        try:
            for program in programs:
                program.start()
            for program in programs:
                await asyncio.to_thread(program.wait_until_up)
            for model in (*CHAT_MODELS, EMBEDDER):  # from here on no request waits for its first load
                await self._until_listed(model)
            begun = time.monotonic()
            running = asyncio.create_task(self.traffic.run())
            side = [asyncio.create_task(work(begun)) for work in (self._sample, self._fail)]
            await asyncio.wait({running, *side}, timeout=self.seconds, return_when=asyncio.FIRST_EXCEPTION)
            for task in (running, *side):
                if task.done() and (problem := task.exception()) is not None:
                    raise problem
            for task in side:
                task.cancel()
            await asyncio.gather(*side, return_exceptions=True)
            self._resume()
            self.traffic.is_stopped = True
            await running
            return await self._judge()
        finally:
            self._resume()
            for program in programs:
                await asyncio.to_thread(program.stop)

    async def _sample(self, begun: float) -> None:
        watched = {"gateway": self.gateway, "north": self.nodes["north"]}
        while True:
            await asyncio.sleep(SAMPLE_S)
            self.yardsticks.append((time.monotonic(), await asyncio.to_thread(_yardstick)))
            for name, program in watched.items():
                for kind, value in program.measured().items():
                    self.readings.setdefault((name, kind), []).append((time.monotonic() - begun, value))

    async def _fail(self, begun: float) -> None:
        while True:
            await asyncio.sleep(FAULT_S)
            kind = self.chance.choice(("worker killed", "node started again", "node hung"))
            name = "south" if kind == "node started again" else self.chance.choice(("north", "south"))
            node = self.nodes[name]
            self.faults[kind] += 1
            if kind == "worker killed":
                worker = node.worker()
                if worker is not None:
                    os.kill(worker, signal.SIGKILL)
            elif kind == "node hung":
                node.send(signal.SIGSTOP)
                await asyncio.sleep(HANG_S)
                node.send(signal.SIGCONT)
            else:
                await asyncio.to_thread(node.stop)
                node.start()

    def _resume(self) -> None:
        for node in self.nodes.values():
            if node.process is not None and node.process.poll() is None:
                node.send(signal.SIGCONT)

    async def _judge(self) -> bool:
        print(f"outcomes: {dict(sorted(self.traffic.outcomes.items()))}")
        print(f"faults: {dict(self.faults)}")
        is_good = True
        for (name, kind), readings in self.readings.items():
            is_good &= _report(f"{name}: {kind}", readings, BOUNDS[kind])
        latencies = compared(_medians(self.traffic.latencies), _medians(self.yardsticks))
        is_good &= _report("latency of ready models", latencies, LATENCY, scale=1000.0)
        return await self._compare_ledger() and is_good

    async def _compare_ledger(self) -> bool:
        counted = Counter(self.traffic.tokens)
        for request_id in self.traffic.unclear:
            found = await asyncio.to_thread(self._get, f"/fleet/activity/{request_id}")
            counted["prompt"] += found.get("prompt_tokens") or 0
            counted["completion"] += found.get("completion_tokens") or 0
        deadline = time.monotonic() + SETTLE_S
        while True:
            rows = (await asyncio.to_thread(self._get, "/fleet/usage?by=key"))["rows"]
            row: dict[str, Any] = next((row for row in rows if row["name"] == "client"), {})
            ledger = {"prompt": row.get("prompt_tokens", 0), "completion": row.get("completion_tokens", 0)}
            if ledger == dict(counted) or time.monotonic() > deadline:
                break
            await asyncio.sleep(1.0)
        is_equal = ledger == dict(counted)
        verdict = "equal" if is_equal else "DIFFERENT"
        print(f"ledger {verdict}: {ledger}, clients {dict(counted)}, unclear requests {len(self.traffic.unclear)}")
        return is_equal

    async def _until_listed(self, model: str) -> None:
        """Returns when the gateway has the report of a node that serves `model`."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            try:
                await asyncio.to_thread(self._get, f"/v1/models/{model}")
            except urllib.error.HTTPError as error:
                if error.code != 404 or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.2)
            else:
                return

    def _get(self, path: str) -> Any:
        headers = {"authorization": f"Bearer {self.admin.text}"}
        request = urllib.request.Request(self.gateway.url + path, headers=headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)


def _yardstick() -> float:
    begun = time.perf_counter()
    sum(range(YARDSTICK_STEPS))
    return time.perf_counter() - begun


def _medians(latencies: list[Reading]) -> list[Reading]:
    windows: dict[int, list[float]] = {}
    for at, value in latencies:
        windows.setdefault(int(at / WINDOW_S), []).append(value)
    return [(window * WINDOW_S, statistics.median(values)) for window, values in sorted(windows.items())]


def _report(name: str, readings: list[Reading], bound: Bound, scale: float = 1.0) -> bool:
    found = growth([(at, value * scale) for at, value in readings], bound)
    verdict = "flat" if found.is_flat else "GROWS"
    print(f"{name}: {verdict}, mean {found.mean:.1f} {bound.unit}, grown {found.grown:+.2f} of {found.allowed:.1f}")
    return found.is_flat


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cortex-soak-") as folder:
        is_good = asyncio.run(Soak(Path(folder), options.minutes, options.seed).run())
    print("passed" if is_good else "FAILED")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
