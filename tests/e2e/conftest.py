"""The real programs with the real demo model: what `make up` starts, on free ports, in a folder of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console

from cortex.cli.up.demo import SMOLLM2, ensure_demo_model
from cortex.neuron.kernels.native.library import native_library_or_none

from ..ports import free_port
from ..programs import PYTHONPATH
from ..waiting import WAIT_S, wait_until

MARK = "E2E_TEST_RUN"


@dataclass
class Run:
    """One `cortex up`, its output, and every process that descends from it."""

    process: subprocess.Popen[str]
    port: int
    metrics_port: int
    neuron_port: int
    mark: str
    lines: list[str] = field(default_factory=list)
    _printed: threading.Condition = field(default_factory=threading.Condition)
    _has_ended: bool = False
    """Nothing more is printed."""
    _reader: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._printed:
                self.lines.append(line)
                self._printed.notify_all()
        with self._printed:
            self._has_ended = True
            self._printed.notify_all()

    def wait_ready(self) -> None:
        """Returns once it has printed that it is ready, and how it is used."""
        with self._printed:
            self._printed.wait_for(lambda: self._has_ended or "Ctrl-C stops everything.\n" in self.lines, WAIT_S)
        assert not self._has_ended, f"cortex up ended with {self.process.wait(WAIT_S)}:\n{self.output}"
        assert "Ctrl-C stops everything.\n" in self.lines, f"not ready after {WAIT_S:g} s:\n{self.output}"

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait_end()

    def wait_end(self) -> int:
        code = self.process.wait(WAIT_S)
        assert self._reader is not None
        self._reader.join(WAIT_S)
        return code

    def processes(self) -> list[str]:
        """Command lines of everything alive that was started by this run, however it was re-parented."""
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                environment = (entry / "environ").read_bytes()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (OSError, ProcessLookupError):
                continue  # ended between the listing and the look
            if wanted in environment.split(b"\0") and command:
                found.append(f"{entry.name} {command}")
        return found

    def assert_nothing_left(self) -> None:
        wait_until(lambda: not self.processes(), lambda: f"left running: {self.processes()}")

    def wait_for_program(self, name: str) -> int:
        """The process of the gateway or the neuron, once there is one."""
        started = wait_until(
            lambda: [line for line in self.processes() if f"-m cortex.{name}" in line and "--config" in line],
            lambda: self.output,
        )
        return int(started[0].split()[0])

    def assert_one_line_fault(self, *expected: str, code: int | None = None) -> None:
        """The run ended by itself with one readable line and left nothing behind."""
        ended = self.wait_end()
        assert ended not in (0, -signal.SIGKILL), self.output
        if code is not None:
            assert ended == code, self.output
        fault = self.lines[-1]
        assert fault.startswith("cortex: "), self.output
        for part in expected:
            assert part in fault, self.output
        assert "; " in fault, "no remedy in: " + fault
        assert "Traceback" not in self.output
        self.assert_nothing_left()


Start = Callable[..., Run]


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model in the user's own cache, so that it is fetched once and not once per test run."""
    return ensure_demo_model(Console(stderr=True))


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    """A cache folder that holds the demo model and the compiled functions of the user's own cache, and nothing else."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "models").mkdir()
    (folder / "models" / SMOLLM2.file_name).symlink_to(demo_model)
    (folder / "kernels").mkdir(mode=0o700)
    if native_library_or_none() is not None:  # now they are compiled. A run uses no file from a link to a folder.
        for compiled in (demo_model.parents[1] / "kernels").glob("*.so"):
            shutil.copy2(compiled, folder / "kernels")
    return folder


@pytest.fixture(scope="session")
def start(cache: Path) -> Iterator[Start]:
    """Start `cortex up` with more arguments; everything started is ended with the session."""
    runs: list[Run] = []

    def start(*arguments: str, **environment: str) -> Run:
        ports = [free_port() for _ in range(3)]
        mark = uuid.uuid4().hex
        command = [sys.executable, "-m", "cortex.cli.cortex", "up", *arguments]
        for option, port in zip(("--port", "--metrics-port", "--neuron-port"), ports, strict=True):
            if option not in arguments:
                command += [option, str(port)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": PYTHONPATH, "CORTEX_CACHE": str(cache), MARK: mark, **environment},
        )
        gateway_port, metrics_port, neuron_port = ports
        run = Run(process, gateway_port, metrics_port, neuron_port, mark)
        runs.append(run)
        return run

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGTERM)
    for run in runs:
        try:
            run.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            run.process.kill()


@pytest.fixture(scope="session")
def up(start: Start) -> Run:
    """One ready `cortex up` with the demo model, shared by the tests that only talk to it; the last of them ends it.

    The model is in the cache, as in every start but the first. Indexes that cannot be reached prove that none is asked.
    """
    run = start(PIP_INDEX_URL="http://127.0.0.1:9/simple", HF_HUB_OFFLINE="1")
    run.wait_ready()
    return run


@dataclass
class Gateway:
    """One `python -m cortex.gateway`."""

    url: str
    config: Path


StartSecondGateway = Callable[..., Gateway]


@pytest.fixture(scope="module")
def start_second_gateway(up: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartSecondGateway]:
    """Start another gateway over the node of `up`, which takes far less than another `cortex up`.

    `settings` are lines of its section `[gateway]`, `sections` further ones; `key` is one that it accepts.
    """
    processes: list[subprocess.Popen[bytes]] = []

    def start(*sections: str, settings: str = "", key: str = "any") -> Gateway:
        port = free_port()
        config = tmp_path_factory.mktemp("gateway") / "cortex.toml"
        config.write_text(
            f'[gateway]\nlisten = "127.0.0.1:{port}"\nmetrics_listen = "127.0.0.1:{free_port()}"\n'
            f"poll_interval_s = 0.1\n{settings}\n"
            f'[[neurons]]\nname = "local"\nendpoint = "http://127.0.0.1:{up.neuron_port}"\n' + "\n".join(sections)
        )
        command = [sys.executable, "-m", "cortex.gateway", "--config", str(config)]
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": PYTHONPATH})
        processes.append(process)
        gateway = Gateway(f"http://127.0.0.1:{port}", config)
        _wait_until_listed(gateway, key, process)
        return gateway

    yield start
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(WAIT_S)


def _wait_until_listed(gateway: Gateway, key: str, process: subprocess.Popen[bytes]) -> None:
    request = urllib.request.Request(
        f"{gateway.url}/v1/models/{SMOLLM2.id}", headers={"authorization": f"Bearer {key}"}
    )

    def is_listed() -> bool:
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S):
                return True
        except (urllib.error.URLError, ConnectionError):
            assert process.poll() is None, f"the gateway ended with exit code {process.returncode}"
            return False

    wait_until(is_listed, f"{gateway.url} never listed the model")
