"""`cortex batch` against canned responses; `tests/e2e` runs it against a real gateway."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cortex.system.exits import ExitCode

from ..conftest import CannedGateway, Invoke

LINE = {"custom_id": "1", "method": "POST", "url": "/v1/embeddings", "body": {"model": "m", "input": "x"}}
BATCH = {
    "id": "batch_1",
    "status": "in_progress",
    "request_counts": {"total": 2, "completed": 1, "failed": 0},
    "output_file_id": None,
    "error_file_id": None,
    "errors": None,
    "cost": 0.25,
}


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    file = tmp_path / "lines.jsonl"
    file.write_text(json.dumps(LINE) + "\n")
    return file


def test_submits_a_file_and_waits_for_its_end(
    gateway: CannedGateway, invoke: Invoke, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cortex.cli.commands.batch.time.sleep", lambda _: None)
    gateway.responses["POST", "/v1/files"] = {"id": "file-1"}
    gateway.responses["POST", "/v1/batches"] = BATCH
    counts = {"total": 2, "completed": 2, "failed": 0}
    gateway.responses["GET", "/v1/batches/batch_1"] = BATCH | {"status": "completed", "request_counts": counts}

    assert invoke("batch", "submit", str(lines)).stdout == "batch_1\n"
    shown = invoke("batch", "submit", str(lines), "--window", "2h", "--wait")

    assert "batch_1 is completed: 2 done, 0 failed" in shown.stdout
    sent = [body for method, path, body, _ in gateway.requests if (method, path) == ("POST", "/v1/batches")]
    assert sent[-1] == {"input_file_id": "file-1", "endpoint": "/v1/embeddings", "completion_window": "2h"}
    assert sent[0]["completion_window"] == "24h"
    [form, _] = [body for method, path, body, _ in gateway.requests if path == "/v1/files"]
    assert b'name="purpose"\r\n\r\nbatch' in form
    assert json.dumps(LINE).encode() in form


def test_a_file_without_requests_is_not_sent(gateway: CannedGateway, invoke: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("hello\n")
    assert invoke("batch", "submit", str(file)).code == ExitCode.USAGE
    assert invoke("batch", "submit", str(tmp_path / "absent")).code == ExitCode.USAGE
    assert not gateway.requests


def test_a_batch_that_failed_says_why(gateway: CannedGateway, invoke: Invoke, lines: Path) -> None:
    errors = {"data": [{"message": "url: it must be /v1/embeddings."}]}
    gateway.responses["POST", "/v1/files"] = {"id": "file-1"}
    gateway.responses["POST", "/v1/batches"] = BATCH | {"status": "failed", "errors": errors}

    shown = invoke("batch", "submit", str(lines), "--wait")

    assert shown.code == ExitCode.FAILED
    assert "url: it must be" in shown.error


def test_lists_progress_and_cost(gateway: CannedGateway, invoke: Invoke) -> None:
    row = {"id": "batch_1", "key": "ada", "created_at": 1_700_000_000, "status": "in_progress", "done": 3, "lines": 10}
    row |= {"failed": 1, "tokens": 12345, "cost": 0.5, "endpoint": "/v1/embeddings"}
    gateway.responses["GET", "/fleet/batches"] = {"batches": [row]}

    shown = invoke("batch", "ls").stdout

    for part in ("batch_1", "ada", "3/10", "12,345", "0.5000"):
        assert part in shown
    assert json.loads(invoke("batch", "ls", "--json").stdout) == [row]


def test_writes_results_to_a_file_or_the_output(gateway: CannedGateway, invoke: Invoke, tmp_path: Path) -> None:
    gateway.responses["GET", "/v1/batches/batch_1"] = BATCH
    gateway.responses["GET", "/v1/files/file-2/content"] = b'{"custom_id": "1"}\n'
    gateway.responses["GET", "/v1/messages/batches/msgbatch_1/results"] = b'{"custom_id": "2"}\n'
    running = invoke("batch", "results", "batch_1")
    assert running.code == ExitCode.NOT_FOUND
    assert "1 of 2 lines are done" in running.error

    gateway.responses["GET", "/v1/batches/batch_1"] = BATCH | {"status": "completed", "output_file_id": "file-2"}
    out = tmp_path / "out"
    assert invoke("batch", "results", "batch_1", "-o", str(out)).code == ExitCode.OK

    assert out.read_bytes() == b'{"custom_id": "1"}\n'
    assert invoke("batch", "results", "batch_1").stdout == '{"custom_id": "1"}\n'
    assert invoke("batch", "results", "msgbatch_1").stdout == '{"custom_id": "2"}\n'


def test_cancels_batches_of_both_apis(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.responses["POST", "/v1/batches/batch_1/cancel"] = BATCH | {"status": "cancelling"}
    gateway.responses["POST", "/v1/messages/batches/msgbatch_1/cancel"] = {"processing_status": "canceling"}
    assert "cancelling" in invoke("batch", "cancel", "batch_1").stdout
    assert "canceling" in invoke("batch", "cancel", "msgbatch_1").stdout


def test_results_that_are_cut_off_are_an_error(gateway: CannedGateway, invoke: Invoke, tmp_path: Path) -> None:
    gateway.responses["GET", "/v1/messages/batches/msgbatch_1/results"] = b'{"custom_id": "2"}\n' * 2
    gateway.num_missing_bytes = 19

    failed = invoke("batch", "results", "msgbatch_1", "-o", str(tmp_path / "out"))

    assert failed.code == ExitCode.UNREACHABLE
    assert "ended early" in failed.error
