"""Workers that are killed, and model files that are broken or made to do harm."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import struct
from typing import TYPE_CHECKING, Any

import pytest

from ....waiting import WAIT_S, wait_until
from ..conftest import FORK_SERVER, WIDE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ..conftest import Daemon

pytestmark = pytest.mark.e2e

KILLS = 6
"""One more than the faults in a row after which a model is given up: a response in between starts the count again."""
MEBIBYTE = 1 << 20


def kill_mid_stream(daemon: Daemon, name: str = "neuron-worker") -> dict[str, Any]:
    """Kills the process of that name once a response has begun; what the stream says last."""
    host, _, port = daemon.url.removeprefix("http://").partition(":")
    victim = daemon.process_called(name)
    connection = http.client.HTTPConnection(host, int(port), timeout=WAIT_S)
    body = {"model": WIDE, "prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    events: list[dict[str, Any]] = []
    for line in response:
        if line.startswith(b"data: {"):
            events.append(json.loads(line[6:]))
            if len(events) == 1:
                os.kill(victim, signal.SIGKILL)
    connection.close()
    return events[-1]


def next_response(daemon: Daemon) -> Any:
    """The choices of the next response; every rejection before it says that the model is recovering."""

    def choices() -> Any:
        status, body = daemon.complete(WIDE)
        if status != 200:
            assert (status, body["error"]["code"]) == (503, "recovering")
        return body.get("choices")

    return wait_until(choices)


def wait_for_one_worker(daemon: Daemon) -> None:
    """One worker and one fork server, and nothing that is left over; tokenizer and parser fork as they need."""

    def is_alone() -> bool:
        names = list(daemon.descendants().values())
        known = {"neuron-tokenize", "neuron-worker", FORK_SERVER}
        return set(names) - {"cortex-parse"} == known and names.count("neuron-worker") == names.count(FORK_SERVER) == 1

    wait_until(is_alone, f"left: {daemon.descendants()}")


def test_model_responds_again_each_time_its_worker_is_killed_in_a_stream(daemon: Daemon) -> None:
    status, first = daemon.complete(WIDE)
    assert status == 200
    for _ in range(KILLS):
        assert kill_mid_stream(daemon)["error"]["code"] == "recovering"
        assert next_response(daemon) == first["choices"]
    wait_for_one_worker(daemon)


def test_model_responds_again_after_its_worker_and_the_fork_server_were_killed(daemon: Daemon) -> None:
    assert kill_mid_stream(daemon, FORK_SERVER)["error"]["code"] == "recovering"
    next_response(daemon)  # the engine is imported again
    wait_for_one_worker(daemon)


# Hostile files. Each takes a folder and writes what a download or a prankster may have left there; it gives the source.


def gguf_with(*, version: int = 3, tensors: int = 0, pairs: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + rest


def gguf_string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def safetensors_with(header: Any, data: bytes = b"") -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def single_file(name: str, content: bytes) -> Callable[[Path, Path, Path], Path]:
    def write(folder: Path, _demo: Path, _tiny: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def truncated_demo(folder: Path, demo: Path, _tiny: Path) -> Path:
    with demo.open("rb") as whole:
        (folder / "cut.gguf").write_bytes(whole.read(30_000_000))
    return folder / "cut.gguf"


def damaged_header(folder: Path, demo: Path, _tiny: Path) -> Path:
    shutil.copyfile(demo, folder / "damaged.gguf")
    with (folder / "damaged.gguf").open("r+b") as file:
        file.seek(200)
        file.write(b"\xff" * 64)
    return folder / "damaged.gguf"


def tiny_with(**files: bytes) -> Callable[[Path, Path, Path], Path]:
    """The tiny model with some of its files replaced; `__` in a name stands for a dot."""

    def write(folder: Path, _demo: Path, tiny: Path) -> Path:
        shutil.copytree(tiny, folder, dirs_exist_ok=True)
        for name, content in files.items():
            (folder / name.replace("__", ".")).write_bytes(content)
        return folder

    return write


def shards_elsewhere(folder: Path, _demo: Path, tiny: Path) -> Path:
    """An index that names its shards outside of the model's folder."""
    shutil.copytree(tiny, folder, dirs_exist_ok=True)
    (folder / "model.safetensors").unlink()
    shard = os.path.relpath(tiny / "model.safetensors", folder)
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": shard, "lm_head.weight": "/etc/passwd"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def tiny_cut_short(folder: Path, _demo: Path, tiny: Path) -> Path:
    shutil.copytree(tiny, folder, dirs_exist_ok=True)
    content = (tiny / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    return folder


BAD_OFFSETS = {"model.embed_tokens.weight": {"dtype": "F32", "shape": [256, 64], "data_offsets": [0, 1 << 50]}}
NEGATIVE = {"model.embed_tokens.weight": {"dtype": "F32", "shape": [-1, 64], "data_offsets": [0, 256]}}

HOSTILE: dict[str, Callable[[Path, Path, Path], Path]] = {
    "wrong magic": single_file("letter.gguf", b"Dear reader, " * 100),
    "empty": single_file("empty.gguf", b""),
    "truncated": truncated_demo,
    "damaged header": damaged_header,
    "absurd tensor count": single_file("count.gguf", gguf_with(tensors=1 << 60)),
    "absurd pair count": single_file("pairs.gguf", gguf_with(pairs=1 << 60)),
    "absurd string": single_file("text.gguf", gguf_with(pairs=1, rest=struct.pack("<Q", 1 << 62))),
    "array bomb": single_file(
        "bomb.gguf", gguf_with(pairs=1, rest=gguf_string(b"bomb") + struct.pack("<IIQ", 9, 9, 1 << 40))
    ),
    "header longer than the file": tiny_with(model__safetensors=struct.pack("<Q", 1 << 60) + b"{}"),
    "header of brackets": tiny_with(model__safetensors=safetensors_with(b"[" * 100_000)),
    "offsets beyond the file": tiny_with(model__safetensors=safetensors_with(BAD_OFFSETS, bytes(256))),
    "negative shape": tiny_with(model__safetensors=safetensors_with(NEGATIVE, bytes(256))),
    "weights cut short": tiny_cut_short,
    "shards elsewhere": shards_elsewhere,
    "config of brackets": tiny_with(config__json=b"[" * 100_000),
    "config of nonsense": tiny_with(config__json=b'{"model_type": "llama", "hidden_size": "wide"}'),
    "config of absurd sizes": tiny_with(
        config__json=json.dumps(
            {
                "model_type": "llama",
                "hidden_size": 1 << 40,
                "intermediate_size": 1 << 40,
                "num_hidden_layers": 1 << 30,
                "num_attention_heads": 4,
                "max_position_embeddings": 1 << 40,
                "vocab_size": 1 << 40,
            }
        ).encode()
    ),
    "tokenizer of nonsense": tiny_with(tokenizer__json=b'{"model": {"type": "BPE", "vocab": 7}}'),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_model_is_rejected_and_leaves_nothing_behind(
    daemon: Daemon, tmp_path: Path, demo_model: Path, tiny_model: Path, kind: str
) -> None:
    source = HOSTILE[kind](tmp_path, demo_model, tiny_model)
    name = f"hostile-{kind.replace(' ', '-')}"
    daemon.wait_ready(WIDE)
    processes, before_bytes = daemon.descendants(), daemon.held_bytes()
    status, rejection = daemon.call("/models/load", {"model_id": name, "source": str(source)})
    is_unsupported = kind in ("config of nonsense", "config of absurd sizes")
    expected = (422, "model_unsupported") if is_unsupported else (502, "files_damaged")
    assert (status, rejection["error"]["code"]) == expected, rejection
    assert "Traceback" not in rejection["error"]["message"]
    model = daemon.model(name)
    assert (model["state"], model["measured_bytes"]) == ("failed", None)
    assert model["reason"]
    wait_until(
        lambda: daemon.descendants().keys() <= processes.keys(), "a process is left"
    )  # its tokenizer may be ending
    lasting = {each for each, name in processes.items() if name in ("neuron-worker", FORK_SERVER)}
    assert lasting <= daemon.descendants().keys()
    assert daemon.held_bytes() - before_bytes < 64 * MEBIBYTE
    status, _ = daemon.call("/models/unload", {"model_id": name})
    assert (status, daemon.model(name)["state"]) == (200, "cold")
    assert daemon.complete(WIDE)[0] == 200
