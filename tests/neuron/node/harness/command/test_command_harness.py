"""A model in a server of its own: loaded, measured, stopped, and what can go wrong with it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from faulty_models import running_node, write_model

from cortex.http.ticker import Ticker
from cortex.http.upstream.pool import Pool
from cortex.neuron.config import NeuronConfig
from cortex.neuron.node.harness.command import host
from cortex.neuron.node.harness.command.estimates import CommandEstimates, ServedFiles, SizeOfModel
from cortex.neuron.node.harness.command.harness import CommandHarness
from cortex.neuron.node.harness.command.host import CommandHost, ServerCommand, free_port
from cortex.neuron.node.harness.command.server_memory import ServerMemory
from cortex.neuron.node.library import KnownModel
from cortex.neuron.node.node import Node
from cortex.neuron.servers.entry import HarnessEntry
from cortex.neuron.worker.discovery import read_devices
from cortex.wire.errors import InsufficientCapacity, InvalidValue, LoadFailed
from cortex.wire.node.orders import LoadRequest, UnloadRequest
from cortex.wire.node.protocol import ModelState

from .....waiting import until, wait_until
from .commands import SERVER, START, NotedSizes, config, servers


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split(") ")[1][0] != "Z"
    except OSError:
        return False


async def load(node: Node) -> Any:
    return await node.load(LoadRequest(model_id="m"), wait=True)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert not servers()


async def test_a_model_is_loaded_measured_and_unloaded(tmp_path: Path) -> None:
    async with running_node(tmp_path, config(model={"context_tokens": 900}, memory_mb=1)) as node:
        assert "fake" in node.discovery.harnesses
        status = await load(node)
        assert (status.state, status.harness, status.family) == (ModelState.READY, "fake", "fake")
        assert (status.context_tokens, status.devices) == (900, (0,))
        assert 1 << 20 < (status.measured_bytes or 0) < 1 << 30
        [process] = servers()
        status = await node.unload(UnloadRequest(model_id="m"))
        assert status.state is ModelState.COLD
        assert not is_running(process)
        # The next load is placed by what the first one took.
        status = await load(node)
        assert abs((status.estimate_bytes or 0) - (status.measured_bytes or 0)) < 1 << 20 < (status.estimate_bytes or 0)


@pytest.mark.parametrize(
    ("memory_mb", "measured_mb", "expected_mb"),
    [
        (None, None, 125),
        (None, 0, 125),
        (None, 99, 125),
        (None, 100, 100),
        (None, 300, 300),
        (200, None, 200),
        (200, 0, 200),
        (200, 300, 300),
    ],
)
def test_a_measurement_that_is_too_small_does_not_count(
    memory_mb: int | None, measured_mb: int | None, expected_mb: int
) -> None:
    entry = HarnessEntry(name="fake", cmd=START, memory_mb=memory_mb)
    metadata, model = ServedFiles(Path(), "fake", "", 100 << 20, 0, 1), KnownModel(id="m", source="m")
    estimates = CommandEstimates(NeuronConfig(), entry)
    if measured_mb is not None:
        size = SizeOfModel(estimates, model, metadata)
        assert size.started(measured_mb << 20) == expected_mb << 20, "while it is loaded"
    assert estimates.whole_bytes(model, metadata) == expected_mb << 20


async def test_changed_configuration_is_used_without_a_restart(tmp_path: Path) -> None:
    async with running_node(tmp_path, config(model={"context_tokens": 900})) as node:
        await load(node)
        [process] = servers()
        before = node._config  # noqa: SLF001 - as its file says
        [fake] = before.harnesses
        [model] = before.models
        other = msgspec.structs.replace(fake, name="other")
        changed = msgspec.structs.replace(
            before,
            harnesses=(msgspec.structs.replace(fake, max_concurrent=3), other),
            models=(
                msgspec.structs.replace(model, context_tokens=700),
                msgspec.structs.replace(model, id="n", harness="other"),
            ),
            drain_s=1.0,
            max_body_mb=7,
        )
        assert await node.reconfigure(changed) == ("max_body_mb",)
        assert is_running(process), "what is loaded stays as it is"
        assert "other" in node.discovery.harnesses
        assert node.health().num_reloads == 1, "which has gateways read it"
        await node.unload(UnloadRequest(model_id="m"))
        assert (await load(node)).context_tokens == 700
        assert (await node.load(LoadRequest(model_id="n"), wait=True)).state is ModelState.READY
        await node.unload(UnloadRequest(model_id="n"))
        assert await node.reconfigure(before) == ("harnesses.other",)
        assert "n" not in {status.id for status in node.health().models}


async def test_closing_the_node_ends_the_server(tmp_path: Path) -> None:
    async with running_node(tmp_path, config()) as node:
        await load(node)
        [process] = servers()
    assert not is_running(process)


@pytest.mark.parametrize("where", [{"memory_mb": 1 << 30}, {"model": {"memory_mb": 1 << 30}}])
async def test_placed_by_bytes(tmp_path: Path, where: dict[str, Any]) -> None:
    async with running_node(tmp_path, config(**where)) as node:
        with pytest.raises(InsufficientCapacity, match="m needs at least"):
            await load(node)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"cmd": ["/no/such/program", "${PORT}"]}, "could not be started.*cannot start /no/such/program: No such file"),
        ({"cmd": [*START, "--exits", "4", "--say", "no card"]}, "ended with status 4; the end of its log: no card"),
        ({"cmd": [*START, "--exits", "0"]}, "ended with status 0"),
        (
            {"cmd": [*START, "--is-never-healthy", "--ignores-sigterm"], "health": {"timeout_s": 0.5}},
            "not healthy within 0.5 s .health.path /health, health.timeout_s.: ",
        ),
        ({"cmd": [*START, "${CONTEXT}"]}, "needs \\$\\{CONTEXT\\}; set `context_tokens`"),
        ({"cmd": [*START, "${NOPE}"]}, "uses \\$\\{NOPE\\}, which does not exist; there are \\$\\{PORT\\}"),
        ({"cmd": [*START, "${env.NOT_THERE}"]}, "environment variable NOT_THERE"),
        ({"cmd_stop": "stop ${CONTEXT}"}, "needs \\$\\{CONTEXT\\}; set `context_tokens`"),
        ({"env": {"X": "${NOPE}"}}, "uses \\$\\{NOPE\\}, which does not exist"),
    ],
)
async def test_a_server_that_does_not_start_fails_the_load(tmp_path: Path, entry: Any, reason: str) -> None:
    async with running_node(tmp_path, config(**entry)) as node:
        with pytest.raises(LoadFailed, match=reason):
            await load(node)
        assert node.model("m").state is ModelState.FAILED
        assert not servers()


TRACEBACK = "".join(f"\n  File {number}.py" for number in range(30))
VLLM_WITHOUT_MEMORY = "Free memory on device cuda:0 (2/24 GiB) on startup is less than desired GPU memory utilization"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (
            ["/bin/sh", "-c", 'ulimit -v 90000; exec "$@"', "sh", *START, "--holds-mb", "200"],
            "ended with status 1; the end of its log: .*MemoryError",
        ),
        ([*START, "--exits", "1", "--say", "CUDA error: out of memory"], "ended with status 1"),
        ([*START, "--exits", "1", "--say", f"torch.OutOfMemoryError{TRACEBACK}"], "ended with status 1"),
        ([*START, "--exits", "1", "--say", "allocateMemory: ErrorOutOfDeviceMemory"], "ended with status 1"),
        ([*START, "--exits", "1", "--say", VLLM_WITHOUT_MEMORY], "ended with status 1"),
        (["/bin/sh", "-c", "kill -9 $$", "${PORT}"], "ended by signal 9, which the system sends when memory runs out"),
    ],
)
async def test_a_server_that_ends_for_lack_of_memory_is_reported_as_such(
    tmp_path: Path, command: list[str], reason: str
) -> None:
    async with running_node(tmp_path, config(cmd=command)) as node:
        with pytest.raises(InsufficientCapacity, match=reason):
            await load(node)
        assert node.model("m").reason_code == InsufficientCapacity.code


class SilentSink:
    def on_progress(self, *_: Any) -> None: ...


class FailingSink:
    def on_progress(self, *_: Any) -> None:
        raise RuntimeError("no progress")


@pytest.mark.parametrize("fails_at", ["health", "measurement"])
async def test_a_failed_start_leaves_no_connection(monkeypatch: pytest.MonkeyPatch, fails_at: str) -> None:
    closed: list[Pool] = []

    class WatchedPool(Pool):
        def close(self) -> None:
            super().close()
            closed.append(self)

    monkeypatch.setattr(host, "Pool", WatchedPool)
    readings = [0]

    def free_bytes() -> int:
        if not readings:
            raise RuntimeError("no reading")
        return readings.pop()

    flags = ("--is-never-healthy",) if fails_at == "health" else ()
    start = [sys.executable, "-S", SERVER, *flags, "--port"]
    command = ServerCommand(lambda port: [*start, str(port)], lambda *_: [], lambda _: os.environ)
    entry = HarnessEntry(name="fake", cmd=START)
    server = CommandHost(
        "m",
        entry,
        command,
        ServerMemory((0,), free_bytes, 1),
        None,
        Ticker(asyncio.get_running_loop()),
        free_port,
        cast(SizeOfModel, NotedSizes()),
    )
    sink: Any = FailingSink() if fails_at == "health" else SilentSink()
    with pytest.raises(RuntimeError):
        await server.load(sink)
    assert server.pool is None
    assert len(closed) == 1


async def test_an_unload_ends_a_server_that_is_starting(tmp_path: Path) -> None:
    async with running_node(tmp_path, config("--is-never-healthy", "--ignores-sigterm")) as node:
        await node.load(LoadRequest(model_id="m"), wait=False)
        await until(servers)
        assert node.model("m").progress is not None
        await node.unload(UnloadRequest(model_id="m"))
        assert not servers()
        assert node.model("m").state is ModelState.COLD


async def test_a_server_that_starts_does_not_delay_another_one(tmp_path: Path) -> None:
    settings = config()
    slow = {"name": "slow", "cmd": [*START, "--is-never-healthy"], "memory_mb": 16}
    settings["harnesses"].append(slow)
    settings["models"].append({"id": "slow", "harness": "slow"})
    async with running_node(tmp_path, settings) as node:
        await node.load(LoadRequest(model_id="slow"), wait=False)
        await until(servers)
        assert (await load(node)).state is ModelState.READY
        assert node.model("slow").state is ModelState.LOADING


async def test_unsupported_options_are_rejected(tmp_path: Path) -> None:
    async with running_node(tmp_path, config(model={"replicas": 2}) | {"cpu_devices": 2}) as node:
        with pytest.raises(LoadFailed, match="has `replicas`, which the harness fake does not support"):
            await load(node)


async def test_the_files_of_a_model_are_found_only_where_the_command_has_their_path(tmp_path: Path) -> None:
    source = write_model(tmp_path / "the files", config={"model_type": "unheard_of"})
    settings = config("--say", "files at ${MODEL_PATH}", "--exits", "1", model={"source": str(source)}, memory_mb=None)
    async with running_node(tmp_path, settings) as node:
        with pytest.raises(LoadFailed, match=f"its log: files at {source}"):
            await load(node)
        files_bytes = sum(file.stat().st_size for file in source.iterdir())
        assert node.model("m").estimate_bytes == files_bytes * 5 // 4
        assert node.model("m").file_bytes == files_bytes


@pytest.mark.parametrize(
    ("file", "quant", "expected"),
    [
        ("phi-Q4_K_M.gguf", None, "q4_k_m"),
        ("phi.gguf", "Q8_0", "q8_0"),
        ("phi.gguf", None, None),
        ("ggml-base-q5_1.bin", None, None),
    ],
)
async def test_the_quantisation_is_what_the_operator_or_the_file_says(
    tmp_path: Path, file: str, quant: str | None, expected: str | None
) -> None:
    (tmp_path / file).write_bytes(bytes(100))
    harness = CommandHarness(HarnessEntry(name="fake", cmd=(*START, "${MODEL_PATH}")), NeuronConfig(), read_devices)
    metadata, _ = await harness.read(KnownModel(id="m", source="m", quant=quant), tmp_path / file)
    assert (metadata.quant, metadata.file_bytes) == (expected, 100)


async def test_quotes_and_spaces_reach_the_server_unchanged(tmp_path: Path) -> None:
    command = f"{sys.executable} -S {SERVER} --port '${{PORT}}' --say \"it's ${{env.WORDS}}; $(true) | &\" --exits 1"
    entry = HarnessEntry(name="fake", cmd=command, env={"SERVER_PORT": "${PORT}"})
    settings = NeuronConfig(harnesses=(entry,))
    harness = CommandHarness(entry, settings, read_devices, {**os.environ, "WORDS": "a 'b\" ${PORT}"})
    async with running_node(tmp_path, {"models": [{"id": "m"}]}, harnesses=(harness,)) as node:
        with pytest.raises(LoadFailed) as failed:
            await node.load(LoadRequest(model_id="m", harness="fake"), wait=True)
        assert "its log: it's a 'b\" ${PORT}; $(true) | &" in failed.value.message


async def test_a_port_that_another_program_took_is_replaced(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        ports = iter([other.getsockname()[1]])
        entry = HarnessEntry(name="fake", cmd=START, memory_mb=16)

        def choose() -> int:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                return next(ports, None) or int(free.getsockname()[1])

        harness = CommandHarness(entry, NeuronConfig(), read_devices, choose_port=choose)
        async with running_node(tmp_path, {"models": [{"id": "m"}]}, harnesses=(harness,)) as node:
            status = await node.load(LoadRequest(model_id="m", harness="fake"), wait=True)
            assert status.state is ModelState.READY


async def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    async with running_node(tmp_path, config("--ignores-sigterm", stop_timeout_s=0.3)) as node:
        await load(node)
        [process] = servers()
        await node.unload(UnloadRequest(model_id="m"))
        assert not is_running(process)


async def test_cmd_stop_ends_the_server(tmp_path: Path) -> None:
    stop = ["/bin/sh", "-c", f'echo "$0" > {tmp_path}/stopped; kill -9 "$0"', "${PID}"]
    async with running_node(tmp_path, config("--ignores-sigterm", cmd_stop=stop)) as node:
        await load(node)
        [process] = servers()
        await node.unload(UnloadRequest(model_id="m"))
        assert (tmp_path / "stopped").read_text().strip() == str(process)


async def test_a_cmd_stop_that_cannot_be_run_leaves_no_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    entry = HarnessEntry(name="fake", cmd=START, memory_mb=16, cmd_stop="stop ${env.STOPPER}")
    environment = {**os.environ, "STOPPER": "x"}
    harness = CommandHarness(entry, NeuronConfig(), read_devices, environment)
    async with running_node(tmp_path, {"models": [{"id": "m"}]}, harnesses=(harness,)) as node:
        await node.load(LoadRequest(model_id="m", harness="fake"), wait=True)
        del environment["STOPPER"]
        await node.unload(UnloadRequest(model_id="m"))
        assert not servers()
    assert "m: cmd_stop cannot be run (the harness fake needs the environment variable STOPPER" in caplog.text


async def test_processes_that_left_the_group_end_with_the_server(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with running_node(tmp_path, config("--forks", "--log", str(log))) as node:
        await load(node)
        await until(lambda: log.exists() and log.read_text())  # what it has forked may begin later than it serves
        away = int(log.read_text())
        assert is_running(away)
        await node.unload(UnloadRequest(model_id="m"))
        assert not is_running(away)


async def test_a_server_that_dies_is_started_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running_node(tmp_path, config()) as node:
        await load(node)
        [process] = servers()
        os.kill(process, signal.SIGKILL)
        await until(lambda: "ready → recovering: its server (fake) was ended by signal 9" in caplog.text)
        await until(lambda: node.model("m").state is ModelState.READY)
        assert process not in servers()


async def test_a_server_that_is_not_to_be_restarted_waits_for_the_next_request(tmp_path: Path) -> None:
    async with running_node(tmp_path, config(restart=False)) as node:
        await load(node)
        os.kill(servers()[0], signal.SIGKILL)
        await until(lambda: node.model("m").state is ModelState.COLD)
        assert "was ended by signal 9" in (node.model("m").reason or "")
        assert not servers()
        assert (await load(node)).state is ModelState.READY


async def test_tokens_are_the_servers_affair(tmp_path: Path) -> None:
    async with running_node(tmp_path, config()) as node:
        with pytest.raises(InvalidValue, match="run by the server of the harness fake"):
            await node.texts.encode("m", "text", principal="")


@pytest.mark.parametrize("ends_by_itself", [False, True])
def test_the_servers_group_ends_where_children_are_not_listed(ends_by_itself: bool, tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from cortex.neuron.node.harness.command import guard\n"
        "def absent(): raise FileNotFoundError\n"
        "guard._children = absent\n"
        "sys.exit(guard.main(sys.argv[1:]))\n"
    )
    script = f"touch $TMPDIR/file; sleep 600 & echo $$ $!; {'exit 3' if ends_by_itself else 'wait'}"
    command = [sys.executable, "-c", program, "0", "/bin/sh", "-c", script]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        processes = [int(process) for process in parent.stdout.readline().split()]
        if not ends_by_itself:
            assert [file.name for file in tmp_path.glob("cortex-*/*")] == ["file"]
            parent.stdin.close()
        assert parent.wait() == (3 if ends_by_itself else 128 + signal.SIGKILL)
    assert not list(tmp_path.iterdir()), "temporary files are left"
    wait_until(lambda: not any(map(is_running, processes)))


def test_the_server_dies_with_the_node(tmp_path: Path) -> None:
    """Also by SIGKILL, and also what it has forked away."""
    log = tmp_path / "log"
    program = (
        "import asyncio, sys\n"
        "from cortex.neuron.node.harness.command.server_log import ServerLog\n"
        "from cortex.neuron.node.harness.command.server_process import ServerProcess\n"
        "async def main():\n"
        f"    server = await ServerProcess.start('m', sys.argv[1:], {{'TMPDIR': '{tmp_path}'}}, ServerLog())\n"
        "    while server.pid is None: await asyncio.sleep(0.01)\n"
        "    print(server.pid, flush=True)\n"
        "    await server.ended()\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-S", SERVER, "--port", "0", "--forks", "--ignores-sigterm", "--log", str(log)]
    with subprocess.Popen([sys.executable, "-c", program, *command], stdout=subprocess.PIPE) as node:
        assert node.stdout is not None
        process = int(node.stdout.readline())
        wait_until(lambda: log.exists() and log.read_text())
        away = int(log.read_text())
        assert is_running(process)
        assert is_running(away)
        (temporary,) = tmp_path.glob("cortex-*")
        node.kill()
    wait_until(lambda: not (is_running(process) or is_running(away) or temporary.exists()))
