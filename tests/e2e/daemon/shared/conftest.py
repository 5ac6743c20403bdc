"""One daemon for the files of this folder: starting one takes longer than most of their tests.

Their tests may kill its workers. They unload what they load, except for the model that the daemon starts with.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.neuron.fake_hub import FakeHub, served

from ..conftest import WIDE, Daemon, daemons
from .gguf_files import write_gguf
from .large_tokenizer import large_tokenizer

MAX_RUNNING = 64
"""Requests of one model at once."""
SLEEP_MB = 200
"""Host memory for models that are asleep: a few times that of the wide model."""
STOPS_ITSELF = 'suspend_command = ["sh", "-c", "kill -STOP $PPID"]'
LARGE = ("large-0", "large-1", "large-2")
"""Models with large tokenizers. They share nothing, so that each has its tokenizer built."""


@pytest.fixture(scope="session")
def hub(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    """Repositories of the tiny model: dense, quantised, both, and a quantised one in several files."""
    folder = tmp_path_factory.mktemp("gguf")
    for quant in ("Q4_0", "Q8_0", "F16"):
        write_gguf(folder / f"m-{quant}.gguf", tiny_model, quant)
    (folder / "parts").mkdir()
    write_gguf(folder / "parts" / "m-Q8_0.gguf", tiny_model, "Q8_0", parts=8)
    dense = {path.name: path.read_bytes() for path in tiny_model.iterdir()}
    quants = {path.name: path.read_bytes() for path in folder.glob("*.gguf")}
    split = {f"Q8_0/{path.name}": path.read_bytes() for path in (folder / "parts").iterdir()}
    assert len(split) > 1
    repositories = {
        "tiny/quants-GGUF": quants,
        "tiny/mixed": dense | quants,
        "tiny/split-GGUF": split,
        "tiny/eight": dense | {"m-Q8_0.gguf": quants["m-Q8_0.gguf"]},
    }
    others = [FakeHub(files, repository=name) for name, files in repositories.items()]
    with served(FakeHub(dense, repository="tiny/dense", others=others)) as hub:
        yield hub


@pytest.fixture(scope="session")
def large_models(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Their entries in `neuron.toml`."""
    described = json.dumps(large_tokenizer())
    entries = []
    for name in LARGE:
        folder = tmp_path_factory.mktemp(name)
        shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
        (folder / "tokenizer.json").write_text(described)
        entries.append(f'[[models]]\nid = "{name}"\nsource = "{folder}"')
    return entries


@pytest.fixture(scope="session")
def daemon(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model: Path,
    loads_wide: str,
    large_models: list[str],
    hub: FakeHub,
) -> Iterator[Daemon]:
    """Its models can sleep, and so can it. It downloads from the hub of these tests."""
    environment = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "", "no_proxy": "127.0.0.1"}
    limits = f"[limits]\nsleep_mb = {SLEEP_MB}\nmax_num_seqs = {MAX_RUNNING}"
    with daemons(tmp_path_factory, tiny_model) as start:
        settings = ("drain_s = 1.0", STOPS_ITSELF, limits, loads_wide, *large_models)
        started = start(*settings, environment=environment)
        started.wait_ready(WIDE)
        yield started
