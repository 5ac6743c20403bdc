"""Harnesses that work by naming them: each is started with a program of its name that records how it was called."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from faulty_models import running_node

from cortex.neuron.servers.entry import HarnessEntry
from cortex.neuron.servers.ready_made import BY_NAME, READY_MADE, completed_server, installed
from cortex.wire.node.orders import LoadRequest, UnloadRequest
from cortex.wire.node.protocol import ModelState

from .....waiting import until
from ....api.served import served
from .commands import SERVER, config, servers

CONTAINER = """#!/bin/sh
echo "$@" >> {record}
[ "$1" = stop ] && kill $(cat {directory}/pid)
[ "$1" = run ] || {{ [ "$1" = inspect ] && cat {directory}/pid; exit 0; }}
while [ "$1" != --publish ]; do shift; done
port=${{2##*:}}
setsid {python} -S {server} --port "$port" & echo $! > {directory}/pid
wait
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Writes a program that is on the PATH, before others."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")

    def write(name: str, script: str) -> None:
        file = directory / name
        file.write_text(script)
        file.chmod(file.stat().st_mode | stat.S_IXUSR)

    return write


async def test_a_model_needs_no_more_than_the_name(tmp_path: Path, programs: Callable[[str, str], None]) -> None:
    weights = tmp_path / "the weights.gguf"
    weights.write_bytes(b"\0" * 1000)
    for entry in BY_NAME.values():
        programs(entry.commands["cmd"][0], f'#!/bin/sh\nexec {sys.executable} -S {SERVER} "$@"\n')
    common = {"source": str(weights), "context_tokens": 4096, "memory_mb": 16}
    models = [{"id": f"m-{name}", "harness": name, **common} for name in BY_NAME]
    async with running_node(tmp_path, {"models": models}) as node:
        assert set(BY_NAME) < set(node.discovery.harnesses)
        for name, entry in BY_NAME.items():
            model_id = f"m-{name}"
            status = await node.load(LoadRequest(model_id=model_id), wait=True)
            assert status.state is ModelState.READY
            assert status.capabilities.chat == (not entry.routes)
            upstream = node.upstream(model_id)
            assert upstream is not None
            [process] = servers()
            argv = Path(f"/proc/{process}/cmdline").read_text().split("\0")
            assert str(weights) in argv, "one argument, although it has a space"
            assert not any("${" in argument for argument in argv)
            assert ("4096" in argv) == bool(entry.context_args)
            assert "999" not in argv, "there are no GPUs here"
            await node.unload(UnloadRequest(model_id=model_id))
            assert not servers()


async def test_a_container_is_measured_and_removed(tmp_path: Path, programs: Callable[[str, str], None]) -> None:
    """The server of a container is not a child of the command that started it."""
    record = tmp_path / "record"
    programs("docker", CONTAINER.format(record=record, directory=tmp_path, python=sys.executable, server=SERVER))
    weights = tmp_path / "models--a--b" / "snapshots" / "x" / "weights.gguf"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"\0")
    settings: dict[str, Any] = {
        "harnesses": [{"name": "docker", "args": "image --port ${PORT} --model ${MODEL_PATH}", "memory_mb": 1}],
        "models": [{"id": "m", "harness": "docker", "source": str(weights)}],
    }
    async with running_node(tmp_path, settings) as node:
        status = await node.load(LoadRequest(model_id="m"), wait=True)
        assert (status.measured_bytes or 0) > 4 << 20, "more than the shell that waits for it"
        await node.unload(UnloadRequest(model_id="m"))
    run, *others = record.read_text().splitlines()
    directory = tmp_path / "models--a--b"
    assert run.startswith("run --rm --init --name cortex-")
    assert f"--volume {directory}:{directory}:ro image --port" in run
    name = run.split()[4]
    assert others == [f"inspect --format {{{{.State.Pid}}}} {name}", f"stop {name}", f"rm --force {name}"]


def test_a_container_is_removed_when_the_node_is_killed(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys\n"
        "from cortex.neuron.node.harness.command.server_log import ServerLog\n"
        "from cortex.neuron.node.harness.command.server_process import ServerProcess\n"
        "async def main():\n"
        f"    cleaning = ['/bin/sh', '-c', 'echo removed > {tmp_path}/removed']\n"
        "    server = await ServerProcess.start('m', ['/bin/sleep', '600'], {}, ServerLog(), cleaning)\n"
        "    while server.pid is None: await asyncio.sleep(0.01)\n"
        "    print('started', flush=True)\n"
        "    await server.ended()\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as node:
        assert node.stdout is not None
        assert node.stdout.readline() == b"started\n"
        node.send_signal(signal.SIGKILL)
        node.wait()
    while not (tmp_path / "removed").exists():
        pass


def test_an_entry_changes_what_it_gives() -> None:
    changed = completed_server(HarnessEntry(name="big", like="vllm", args="--x", env={"A": "1"}, max_concurrent=3))
    vllm = READY_MADE["vllm"]
    assert (changed.name, changed.cmd, changed.sleep, changed.max_concurrent) == ("big", vllm.cmd, vllm.sleep, 3)
    assert changed.env == {"VLLM_SERVER_DEV_MODE": "1", "A": "1"}
    assert changed.argv(has_gpus=False, has_context=False)[-1] == "--x"
    own = HarnessEntry(name="vllm", cmd="my vllm ${PORT}")
    assert completed_server(own) is own


def test_only_installed_programs_are_offered(tmp_path: Path) -> None:
    program = tmp_path / "sd-server"
    program.touch(mode=0o755)
    assert [entry.name for entry in installed(str(tmp_path))] == ["sd-server"]


async def test_the_log_outlives_the_server(tmp_path: Path) -> None:
    settings = config("--say", "line \x1b[1;31mone\x1b[0m\r\nline\x07 two", "--exits", "1")
    settings["models"].append({"id": "native"})
    async with (
        running_node(tmp_path, settings) as node,
        served(node) as (host, port),
        aiohttp.ClientSession(f"http://{host}:{port}") as session,
    ):

        async def fetch(path: str) -> tuple[int, Any]:
            async with session.get(path) as response:
                return response.status, json.loads(await response.text())

        assert await fetch("/models/m/log") == (200, {"lines": [], "next": 0})
        await node.load(LoadRequest(model_id="m"), wait=False)
        await until(lambda: node.model("m").state is ModelState.FAILED)
        status, log = await fetch("/models/m/log")
        assert status == 200
        assert log["lines"][0].startswith("--- m (fake) starts")
        assert log["lines"][1:3] == ["line one", "line  two"]
        after = log["next"]
        assert await fetch(f"/models/m/log?after={after}") == (200, {"lines": [], "next": after})
        assert (await fetch("/models/m/log?after=2"))[1]["lines"][0] == "line  two"
        assert (await fetch(f"/models/m/log?after={after + 9}"))[1] == log
        assert (await fetch("/models/native/log"))[0] == 400
        assert (await fetch("/models/m/log?after=x"))[0] == 400


@pytest.mark.parametrize(
    ("name", "leader", "other"),
    [
        ("vllm", "--nnodes ${NUM_NODES} --node-rank ${RANK} --master-addr ${LEADER_HOST}", "--headless"),
        ("vllm-ray", "--distributed-executor-backend ray", "--address=${LEADER_HOST}:${LEADER_PORT}"),
        ("sglang", "--dist-init-addr ${LEADER_HOST}:${LEADER_PORT}", "--node-rank ${RANK}"),
        ("llama-server", "--rpc ${MEMBER_ADDRESSES}", "--host ${MEMBER_HOST} --port ${MEMBER_PORT}"),
        ("torchrun", "torchrun --nnodes ${NUM_NODES} --node-rank ${RANK}", "--master-port ${LEADER_PORT} serve.py"),
    ],
)
def test_groups_start_with_other_arguments_than_servers_on_one_node(name: str, leader: str, other: str) -> None:
    entry = completed_server(HarnessEntry(name=name, args="serve.py" if name == "torchrun" else ()))
    alone, first, second = (" ".join(entry.argv(has_gpus=True, has_context=True, rank=rank)) for rank in (None, 0, 1))
    assert leader in first
    assert other in second
    assert "${LEADER_HOST}" not in alone
    assert ("--headless" in first, "--headless" in second) == (False, name == "vllm")
    assert entry.group_commands["version"]
