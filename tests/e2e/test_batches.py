"""Batches through the whole chain, with the vendors' clients and the command."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anthropic
import openai
import pytest
from click.testing import CliRunner

from cortex.cli.cortex import cortex
from cortex.cli.up.demo import SMOLLM2

from ..waiting import WAIT_S, wait_until

if TYPE_CHECKING:
    from .conftest import Run

pytestmark = pytest.mark.e2e

CAPITALS = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo"}


def question(country: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"What is the capital of {country}? Answer in one sentence."}]
    return {"model": SMOLLM2.id, "messages": messages, "temperature": 0, "max_tokens": 16}


def lines() -> list[dict[str, Any]]:
    return [
        {"custom_id": country, "method": "POST", "url": "/v1/chat/completions", "body": question(country)}
        for country in CAPITALS
    ]


def test_openai_client_gets_a_result_for_every_line(up: Run) -> None:
    client = openai.OpenAI(base_url=f"{up.url}/v1", api_key="any", max_retries=0, timeout=WAIT_S)
    content = "".join(json.dumps(line) + "\n" for line in lines())
    file = client.files.create(file=("in.jsonl", io.BytesIO(content.encode())), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")

    def is_completed() -> bool:
        nonlocal batch
        batch = client.batches.retrieve(batch.id)
        assert batch.status in ("validating", "in_progress", "finalizing", "completed"), batch
        return bool(batch.status == "completed")

    wait_until(is_completed)
    assert batch.output_file_id is not None
    found = [json.loads(line) for line in client.files.content(batch.output_file_id).read().splitlines()]
    texts = {each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"] for each in found}
    assert texts.keys() == CAPITALS.keys()
    assert "Paris" in texts["France"]
    assert batch.usage is not None
    assert batch.usage.output_tokens > 0


def test_anthropic_client_gets_a_result_for_every_request(up: Run) -> None:
    client = anthropic.Anthropic(base_url=up.url, api_key="any", max_retries=0, timeout=WAIT_S)
    requests: Any = [{"custom_id": country, "params": question(country)} for country in CAPITALS]
    batch = client.messages.batches.create(requests=requests)
    wait_until(lambda: client.messages.batches.retrieve(batch.id).processing_status == "ended")

    found = {each.custom_id: each.result for each in client.messages.batches.results(batch.id)}
    assert found.keys() == CAPITALS.keys()
    assert all(each.type == "succeeded" for each in found.values())


def test_command_submits_a_file_and_prints_the_results(up: Run, tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines()))

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(cortex, ["batch", *arguments, "--url", up.url])
        assert result.exit_code == 0, result.output
        return result.stdout

    made = json.loads(run("submit", str(file), "--wait", "--json"))
    assert made["id"] in run("ls")
    assert {json.loads(line)["custom_id"] for line in run("results", made["id"]).splitlines()} == CAPITALS.keys()
