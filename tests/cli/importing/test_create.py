"""`cortex create`: what is sent for a Modelfile."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cortex.cli.failures import ExitCode

if TYPE_CHECKING:
    from ..conftest import CannedGateway, Invoke


DIGEST = f"sha256:{hashlib.sha256(b'weights').hexdigest()}"
CREATED = {"status": "success", "using": "uploaded/own", "notes": ["PARAMETER num_gpu has no effect"]}


def modelfile(folder: Path, text: str) -> str:
    (folder / "Modelfile").write_text(text)
    return str(folder / "Modelfile")


def test_files_that_are_here_are_sent_once(gateway: CannedGateway, invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "sha256-0").write_bytes(b"weights")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "folder" / "README.md").write_bytes(b"no part of a model")
    gateway.responses["POST", f"/api/blobs/{DIGEST}"] = (201, {})
    gateway.responses["POST", "/api/create"] = CREATED
    for text, files in (
        ("FROM ./sha256-0\nFROM ./sha256-0\nSYSTEM x", ["model.gguf", "mmproj-model.gguf"]),
        (f"FROM {tmp_path}/folder", ["model.safetensors"]),
    ):
        gateway.requests.clear()
        result = invoke("create", "own", "-f", modelfile(tmp_path, text))
        assert result.code == 0, result.stderr
        assert "own is uploaded/own" in result.stdout
        *sent, (_, path, body, _) = gateway.requests
        assert (path, body["files"], "from" in body) == ("/api/create", dict.fromkeys(files, DIGEST), False)
        assert [each[0] for each in sent] == ["GET", "POST"] * len(files)
    gateway.responses["GET", f"/api/blobs/{DIGEST}"] = {}
    gateway.requests.clear()
    invoke("create", "own", "-f", modelfile(tmp_path, "FROM ./sha256-0"))
    assert [each[0] for each in gateway.requests] == ["GET", "POST"]


def test_name_or_path_on_a_node_is_sent_as_it_is(gateway: CannedGateway, invoke: Invoke, tmp_path: Path) -> None:
    gateway.responses["POST", "/api/create"] = CREATED
    for source in ("qwen3:8b", "/nowhere/here/x.gguf", "hf.co/org/name:Q4_K_M"):
        assert invoke("create", "own", "-f", modelfile(tmp_path, f"FROM {source}")).code == 0
        assert gateway.requests[-1][2]["from"] == source


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("SYSTEM x", "there is no FROM"),
        ("FROM ./nothing.gguf", "give its full path"),
        ("FROM a\nFROM b", "must name two local files"),
        ("FROM a\nFROM b\nFROM c", "line 3: there are more than two FROM"),
        ("FROM a\nPARSER x", "selects a part of Ollama"),
    ],
)
def test_bad_modelfile_sends_nothing(
    gateway: CannedGateway, invoke: Invoke, tmp_path: Path, text: str, problem: str
) -> None:
    result = invoke("create", "own", "-f", modelfile(tmp_path, text))
    assert (result.code, gateway.requests) == (ExitCode.CONFIG, [])
    assert problem in result.error
