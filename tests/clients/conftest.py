"""A gateway and a node with the scripted model and two small ones for embeddings, and the environments of the clients.

`make clients` makes the environments. A client's program runs in its own one, performs its tasks against the gateway,
and prints what became of each.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from ..neuron.pooled_sources import write_embedder, write_reranker
from ..ports import free_port
from ..waiting import wait_until
from .scripted_model import write_scripted_model

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
READY_TIMEOUT_S = 1800.0
PROGRAM_TIMEOUT_S = 3600.0

Results = Mapping[str, str]
"""The outcome of each task: "passed", or the traceback."""
Run = Callable[[str], Results]


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a gateway with the scripted model, an embedding model and a rerank model."""
    folder = tmp_path_factory.mktemp("clients")
    texts = [page.read_text() for page in sorted((ROOT / "docs").rglob("*.md"))]
    models = [str(write_scripted_model(folder / "scripted", texts))]
    models += [write_embedder(folder / "embedder"), write_reranker(folder / "reranker")]
    ports = [free_port() for _ in range(3)]
    command = [sys.executable, "-m", "cortex.cli.cortex", "up", *models]
    for option, port in zip(("--port", "--metrics-port", "--neuron-port"), ports, strict=True):
        command += [option, str(port)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "CORTEX_CACHE": str(folder / "cache")}
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:

        def is_ready() -> bool:
            assert process.poll() is None, log.read_text()
            return "\nready" in f"\n{log.read_text()}"

        wait_until(is_ready, log.read_text, limit_s=READY_TIMEOUT_S)
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(300)


@pytest.fixture(scope="session")
def run(url: str) -> Run:
    """Runs a client's program once and returns its results."""
    known: dict[str, Results] = {}

    def results_of(program: str) -> Results:
        if program not in known:
            known[program] = _run(program, url)
        return known[program]

    return results_of


def _run(program: str, url: str) -> Results:
    path = HERE / "programs" / program
    interpreter = "node" if path.suffix == ".mjs" else str(_python_of(program))
    done = subprocess.run(
        [interpreter, str(path), url],
        capture_output=True,
        text=True,
        timeout=PROGRAM_TIMEOUT_S,
        check=False,
        cwd=path.parent,
    )
    assert done.stdout, f"{program} printed nothing:\n{done.stderr}"
    results: Results = json.loads(done.stdout.splitlines()[-1])
    return results


def _python_of(program: str) -> Path:
    environment = "aider" if program.startswith("aider") else "frameworks"
    python = HERE / ".venv" / environment / "bin" / "python"
    assert python.exists(), f"{python} is missing: run `make clients`, which makes it"
    return python
