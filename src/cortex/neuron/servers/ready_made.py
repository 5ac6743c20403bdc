"""Ready-made servers by name: a model with `harness = "vllm"` needs only the program."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping

import msgspec

from cortex.neuron.servers.entry import GroupSettings, HarnessEntry, HealthCheck, StateRequest


def _container(program: str, *gpu_args: str) -> HarnessEntry:
    """`args` must give the image and the server's own arguments; it listens on `${PORT}` of all its addresses."""
    name, volume = "cortex-${PORT}", "${MODEL_DIRECTORY}:${MODEL_DIRECTORY}:ro"
    return HarnessEntry(
        name=program,
        cmd=f"{program} run --rm --init --name {name} --publish 127.0.0.1:${{PORT}}:${{PORT}} --volume {volume}",
        gpu_args=(*gpu_args, "--env", "CUDA_VISIBLE_DEVICES=${GPU_IDS}"),
        cmd_stop=(program, "stop", name),
        cmd_kill=(program, "rm", "--force", name),
        cmd_pid=(program, "inspect", "--format", "{{.State.Pid}}", name),
        stop_timeout_s=30.0,
    )


_SLOW = HealthCheck(timeout_s=900.0)
_LEADER = "${LEADER_HOST}:${LEADER_PORT}"
_MASTER = "--master-addr ${LEADER_HOST} --master-port ${LEADER_PORT}"
_VLLM = HarnessEntry(
    name="vllm",
    cmd="vllm serve ${MODEL_PATH} --served-model-name ${MODEL_ID} --host 127.0.0.1 --port ${PORT}",
    gpu_args="--tensor-parallel-size ${GPU_COUNT} --gpu-memory-utilization ${MEMORY_FRACTION} --enable-sleep-mode",
    context_args="--max-model-len ${CONTEXT}",
    env={"VLLM_SERVER_DEV_MODE": "1"},  # without it there is no /sleep
    health=_SLOW,
    sleep=StateRequest("/sleep?level=1"),
    wake=StateRequest("/wake_up"),
    # Layers are divided among the nodes, and each layer among the GPUs of a node.
    group=GroupSettings(
        args=f"--pipeline-parallel-size ${{NUM_NODES}} --nnodes ${{NUM_NODES}} --node-rank ${{RANK}} {_MASTER}",
        member_args="--headless",
        version="vllm --version",
    ),
)
# Ray otherwise gives its members the folder of the head, which nobody removes on their hosts.
_RAY = 'ray start --block --node-ip-address=${MEMBER_HOST} --num-gpus=${GPU_COUNT} --temp-dir="$TMPDIR"'
_RAY_IS_UP = f"ray health-check --address {_LEADER} 2> /dev/null"
# The head and the server: when one ends, so does the other. SIGTERM lets the server end first.
_RAY_HEAD = (
    f"{_RAY} --head --port=${{LEADER_PORT}} --include-dashboard=false --disable-usage-stats & head=$!; "
    f"until {_RAY_IS_UP}; do kill -0 $head || exit 1; sleep 1; done; "
    f'RAY_ADDRESS={_LEADER} "$0" "$@" & server=$!; trap "wait $server; exit" TERM; wait -n'
)
# It starts before the head does, and ends when its part of Ray does.
_RAY_MEMBER = f"until {_RAY_IS_UP}; do sleep 1; done; exec {_RAY} --address={_LEADER}"
# Its name since June 2026; before, it was rpc-server.
_RPC_SERVER = 'program=$(command -v ggml-rpc-server) || program=rpc-server; exec "$program" "$@"'
_SERVERS = (
    HarnessEntry(
        name="llama-server",
        cmd="llama-server --host 127.0.0.1 --port ${PORT} --model ${MODEL_PATH} --alias ${MODEL_ID} --jinja",
        gpu_args="--n-gpu-layers 999",
        context_args="--ctx-size ${CONTEXT}",
        max_concurrent=4,
        group=GroupSettings(
            args="--rpc ${MEMBER_ADDRESSES}",
            member_cmd=("sh", "-c", _RPC_SERVER, "sh", "--host", "${MEMBER_HOST}", "--port", "${MEMBER_PORT}"),
            ready="port",
            version="llama-server --version",
        ),
    ),
    _VLLM,
    msgspec.structs.replace(
        _VLLM,
        name="vllm-ray",
        group=GroupSettings(
            cmd=("bash", "-c", _RAY_HEAD, *_VLLM.commands["cmd"]),
            args="--pipeline-parallel-size ${NUM_NODES} --distributed-executor-backend ray",
            member_cmd=("bash", "-c", _RAY_MEMBER),
            version="ray --version",
        ),
    ),
    HarnessEntry(
        name="sglang",
        cmd="sglang serve --model-path ${MODEL_PATH} --served-model-name ${MODEL_ID} --host 127.0.0.1 --port ${PORT}",
        gpu_args="--tp-size ${GPU_COUNT} --mem-fraction-static ${MEMORY_FRACTION}",
        context_args="--context-length ${CONTEXT}",
        health=_SLOW,
        group=GroupSettings(
            args=f"--pp-size ${{NUM_NODES}} --nnodes ${{NUM_NODES}} --node-rank ${{RANK}} --dist-init-addr {_LEADER}",
            version="sglang version",
        ),
    ),
    HarnessEntry(
        name="whisper-server",
        cmd="whisper-server --host 127.0.0.1 --port ${PORT} --model ${MODEL_PATH} "
        "--inference-path /v1/audio/transcriptions",
        routes=("/v1/audio/transcriptions",),
        max_concurrent=1,
    ),
    HarnessEntry(
        name="sd-server",
        cmd="sd-server --listen-ip 127.0.0.1 --listen-port ${PORT} --model ${MODEL_PATH}",
        health=HealthCheck(path="none"),
        routes=("/v1/images/generations", "/v1/images/edits"),
        max_concurrent=1,
    ),
    HarnessEntry(
        name="tei",
        cmd="text-embeddings-router --hostname 127.0.0.1 --port ${PORT} --prometheus-port ${FREE_PORT} "
        "--model-id ${MODEL_PATH} --served-model-name ${MODEL_ID}",
        routes=("/v1/embeddings",),
    ),
)
_TORCHRUN = HarnessEntry(
    name="torchrun",
    cmd="torchrun --standalone --nproc-per-node ${DEVICE_COUNT}",
    health=_SLOW,
    group=GroupSettings(
        cmd=f"torchrun --nnodes ${{NUM_NODES}} --node-rank ${{RANK}} --nproc-per-node ${{DEVICE_COUNT}} {_MASTER}",
        version=("python", "-c", "import torch; print(torch.__version__)"),
    ),
)
_CONTAINERS = (_container("docker", "--gpus", "all"), _container("podman", "--device", "nvidia.com/gpu=all"))
READY_MADE: Mapping[str, HarnessEntry] = {entry.name: entry for entry in (*_SERVERS, *_CONTAINERS, _TORCHRUN)}
BY_NAME: Mapping[str, HarnessEntry] = {entry.name: entry for entry in _SERVERS}
"""Servers that need no entry."""


def completed_server(entry: HarnessEntry) -> HarnessEntry:
    """The entry, completed with the settings of its ready-made server. Raises ValueError for an unknown one."""
    name = entry.like or entry.name
    if entry.like is not None and name not in READY_MADE:
        raise ValueError(
            f"the harness `{entry.name}` is like `{name}`, which is not ready-made; there are {', '.join(READY_MADE)}"
        )
    base = READY_MADE.get(name)
    if base is None or (entry.cmd and entry.like is None):
        return entry
    if base not in _SERVERS and not (entry.args or entry.cmd):
        what = "the program" if base is _TORCHRUN else "the image"
        raise ValueError(f"the harness `{entry.name}` needs `args`: {what}, and the arguments of its server")
    default = HarnessEntry()
    values = {field: getattr(entry, field) for field in entry.__struct_fields__}
    given = {field: value for field, value in values.items() if value != getattr(default, field)}
    if "env" in given:
        given["env"] = {**base.env, **entry.env}
    return msgspec.structs.replace(base, **given)


def usable(commands: Iterable[HarnessEntry], path: str | None = None) -> dict[str, HarnessEntry]:
    """By name: the ready-made servers on the PATH, and the configured ones."""
    return {entry.name: entry for entry in (*installed(path), *commands)}


def installed(path: str | None = None) -> tuple[HarnessEntry, ...]:
    """Those of `BY_NAME` whose programs are on the PATH."""

    def has(entry: HarnessEntry) -> bool:
        programs = {command[0] for command in (entry.commands["cmd"], entry.group_commands["version"]) if command}
        return all(shutil.which(program, path=path) is not None for program in programs)

    return tuple(filter(has, _SERVERS))
