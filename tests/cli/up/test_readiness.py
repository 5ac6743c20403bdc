"""What `cortex up` reports once its models are ready or have failed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cortex.cli.output import console
from cortex.cli.up.command import ProcessSupervisor, example_request, load_failure, print_ready, wait_until_loaded
from cortex.cli.up.plan import UpPlan
from cortex.cli.up.run_files import Ports
from cortex.cli.up.sources import ModelSource
from cortex.system.exits import ExitCode
from cortex.wire.node.protocol import Capabilities, ModelState, ModelStatus

from ...waiting import WAIT_S

if TYPE_CHECKING:
    from ..conftest import CannedGateway


def test_failed_model_is_not_among_those_that_are_ready(
    gateway: CannedGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = int(gateway.url.rpartition(":")[2])
    models = tuple(ModelSource(name, f"/models/{name}.gguf") for name in ("broken", "whole"))
    plan = UpPlan("127.0.0.1", Ports(port, port, port), models, tmp_path / "cortex.toml", tmp_path, None, False, {})
    statuses = [
        {"id": "broken", "state": "failed", "reason": "add it under [[peers]]"},
        {"id": "whole", "state": "ready"},
    ]
    gateway.responses["GET", "/health"] = {"status": "ok", "uptime_s": 1, "devices": [], "models": statuses}
    gateway.responses["GET", "/v1/models"] = {"data": [{"id": "whole", "loaded": True}]}
    with ProcessSupervisor(grace_s=WAIT_S) as supervisor:
        ready = wait_until_loaded(console(), plan, supervisor)
    assert ready == ["whole"]
    print_ready(console(), plan, ready, 1.0)
    output = capsys.readouterr().out
    assert "broken is not available: add it under [[peers]]" in output
    assert "1.0 s: whole at" in output
    assert '"model": "whole"' in output


@pytest.mark.parametrize(
    ("capabilities", "path"),
    [
        (Capabilities(), "/v1/chat/completions"),
        (Capabilities(chat=False, embeddings=True), "/v1/embeddings"),
        (Capabilities(chat=False, rerank=True), "/v1/rerank"),
    ],
)
def test_first_request_is_one_that_the_model_serves(capabilities: Capabilities, path: str) -> None:
    assert example_request("m", capabilities)[0] == path


@pytest.mark.parametrize(
    ("codes", "exit_code"),
    [
        (["hub_unavailable"], ExitCode.UNREACHABLE),
        (["source_not_found"], ExitCode.NOT_FOUND),
        (["insufficient_capacity", "disk_full"], ExitCode.NO_ROOM),
        (["hub_unavailable", "disk_full"], ExitCode.FAILED),
        ([None], ExitCode.FAILED),
        (["of_a_newer_node"], ExitCode.FAILED),
    ],
)
def test_exit_code_says_why_no_model_is_ready(codes: list[str | None], exit_code: ExitCode) -> None:
    failed = [
        ModelStatus(id=f"m{number}", state=ModelState.FAILED, reason="because", reason_code=code)
        for number, code in enumerate(codes)
    ]
    assert load_failure(failed).exit_code is exit_code


@pytest.mark.parametrize(
    ("named", "code", "remedy"),
    [
        ("google/gemma-4-26b-it", "source_not_found", "did you mean google/gemma-4-26B-A4B-it?"),
        ("mistralai/Mistral-Small-3.2", "source_not_found", "mistralai/Mistral-Small-3.2-24B-Instruct-2506?"),
        ("openai/gpt-oss-20b", "source_not_found", "start again"),
        ("someone/else", "source_not_found", "start again"),
        ("google/gemma-4-26b-it", "disk_full", "start again"),
    ],
)
def test_repository_that_does_not_exist_gives_the_one_that_is_meant(named: str, code: str, remedy: str) -> None:
    failed = ModelStatus(id=named, state=ModelState.FAILED, reason="because", reason_code=code)
    assert remedy in str(load_failure([failed]).remedy)
