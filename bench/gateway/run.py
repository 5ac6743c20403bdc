"""Measures the gateway against its limits, side by side in one run. See README.md.

Usage: python bench/gateway/run.py [--only NAME ...] [--seconds S]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import targets
from targets import COMMANDS, HERE, TOOLS_CPUS, Target

CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
NUM_IDLE_STREAMS = 1000
PACE_US = 20_000
SETTLE_S = 1.5


class Load(NamedTuple):
    """What the load generator measured, and the CPU time of the target."""

    requests: int
    failures: int
    events: int
    seconds: float
    p50_ms: float
    p99_ms: float
    first_p50_ms: float
    cpu_us: float


class Row(NamedTuple):
    """One line of the table."""

    name: str
    requests_per_s: float
    cpu_us_per_request: float
    p50_ms: float
    p99_ms: float
    burst_events_per_s: float
    cpu_us_per_paced_event: float
    paced_first_p50_ms: float
    idle_streams_mb: float
    num_failures: int


def family(pid: int) -> list[int]:
    """A process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(descendant for child in children for descendant in family(int(child)))]


def cpu_us(target: Target) -> float:
    """User and system time spent so far."""
    if target.process is None:
        return 0.0
    ticks = 0
    for pid in family(target.process.pid):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks * 1e6 / CLOCK_TICKS_PER_S


def resident_mb(target: Target) -> float:
    """Resident memory now."""
    if target.process is None:
        return 0.0
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in family(target.process.pid))
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def build_tools(folder: Path) -> tuple[Path, Path]:
    """The pretend upstream and the load generator. Exits with a hint where Go is missing."""
    go = shutil.which("go")
    if go is None:
        sys.exit("the load tools are written in Go: install it (apt-get install golang-go) and run this again")
    for tool in ("upstream", "load"):
        subprocess.run([go, "build", "-o", str(folder / tool), f"./{tool}"], cwd=HERE / "tools", check=True)
    return folder / "upstream", folder / "load"


class Bench:
    """The upstream and the load generator, and what is measured with them."""

    def __init__(self, upstream: subprocess.Popen[bytes], load_tool: Path, seconds: float) -> None:
        if upstream.stdout is None:
            raise ValueError("the upstream must say where it listens")
        self.port = int(upstream.stdout.readline().rpartition(b":")[2])
        self._load_tool = load_tool
        self._seconds = seconds

    def pace(self, microseconds: int) -> None:
        """Set the time between two events of the streams that start from now on."""
        urllib.request.urlopen(f"http://127.0.0.1:{self.port}/pace?us={microseconds}", timeout=5).read()

    def load(self, target: Target, connections: int, seconds: float, *options: str) -> Load:
        """Run the load generator against `target`."""
        before = cpu_us(target)
        process = self._start(target, connections, seconds, *options)
        output = process.communicate(timeout=seconds + 30)[0]
        seen = json.loads(output)
        return Load(
            **{field: seen[field] for field in Load._fields if field != "cpu_us"}, cpu_us=cpu_us(target) - before
        )

    def _start(self, target: Target, connections: int, seconds: float, *options: str) -> subprocess.Popen[bytes]:
        address = f"127.0.0.1:{target.port}"
        command = [self._load_tool, "-address", address, "-connections", connections, "-seconds", seconds, *options]
        return targets.spawn([str(part) for part in command], TOOLS_CPUS, stdout=subprocess.PIPE)

    def measure(self, target: Target) -> Row:
        """One line of the table, in about five times `seconds`."""
        seconds = self._seconds
        self.pace(0)
        self.load(target, 32, seconds / 4)  # connections open, code paths warm
        alone = self.load(target, 1, seconds)
        many = self.load(target, 32, seconds)
        burst = self.load(target, 32, seconds, "-stream")
        self.pace(PACE_US)
        paced = self.load(target, 64, seconds, "-stream")
        self.pace(600_000_000)
        idle = self._start(target, NUM_IDLE_STREAMS, SETTLE_S + 2, "-hold")
        time.sleep(SETTLE_S + 1)
        idle_mb = resident_mb(target)
        idle_failures = json.loads(idle.communicate(timeout=30)[0])["failures"]
        self.pace(0)
        return Row(
            name=target.name,
            requests_per_s=many.requests / many.seconds,
            cpu_us_per_request=many.cpu_us / max(1, many.requests),
            p50_ms=alone.p50_ms,
            p99_ms=alone.p99_ms,
            burst_events_per_s=burst.events / burst.seconds,
            cpu_us_per_paced_event=paced.cpu_us / max(1, paced.events),
            paced_first_p50_ms=paced.first_p50_ms,
            idle_streams_mb=idle_mb,
            num_failures=alone.failures + many.failures + burst.failures + paced.failures + idle_failures,
        )


def print_table(rows: list[Row]) -> None:
    """Absolute figures, and delays as what each gateway adds to the first row, which must be the upstream itself."""
    direct = rows[0]
    print()
    print(
        "| | req/s, 32 conns | CPU µs/request | added p50 / p99 ms, 1 conn | burst events/s | CPU µs/paced event |",
        end="",
    )
    print(f" added first event p50 ms | RSS MB, {NUM_IDLE_STREAMS:,} idle streams | failures |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        is_direct = row is direct
        cells = [
            row.name,
            f"{row.requests_per_s:,.0f}",
            "–" if is_direct else f"{row.cpu_us_per_request:.0f}",
            f"({row.p50_ms:.3f} / {row.p99_ms:.3f})"
            if is_direct
            else f"{row.p50_ms - direct.p50_ms:.3f} / {row.p99_ms - direct.p99_ms:.3f}",
            f"{row.burst_events_per_s:,.0f}",
            "–" if is_direct else f"{row.cpu_us_per_paced_event:.1f}",
            f"({row.paced_first_p50_ms:.2f})"
            if is_direct
            else f"{row.paced_first_p50_ms - direct.paced_first_p50_ms:.2f}",
            "–" if is_direct else f"{row.idle_streams_mb:.0f}",
            str(row.num_failures),
        ]
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    """Build, start, measure, print."""
    parser = argparse.ArgumentParser(description="Measure the gateway side by side with its limits.")
    parser.add_argument("--only", nargs="*", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each load (five loads per row)")
    options = parser.parse_args()
    print(f"load average before the run: {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="cortex-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        upstream_tool, load_tool = build_tools(folder)
        upstream = targets.spawn([str(upstream_tool)], TOOLS_CPUS, stdout=subprocess.PIPE)
        stack.callback(targets.stop, upstream)
        bench = Bench(upstream, load_tool, options.seconds)
        rows = [bench.measure(Target("(direct)", bench.port, None))]
        for target_name in options.only:
            port = targets.free_port()
            command = COMMANDS[target_name](folder, bench.port, port)
            if command is None:
                print(f"{target_name}: not installed, skipped", file=sys.stderr)
                continue
            with targets.running(target_name, command, port) as target:
                rows.append(bench.measure(target))
    print_table(rows)


if __name__ == "__main__":
    main()
