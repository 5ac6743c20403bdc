"""Gateways with batches, and their clients."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
from openai import AsyncOpenAI
from openai.types import Batch

from cortex.gateway.batches.runner import BatchLimits

from ...waiting import WAIT_S, until_response
from ..started_gateway import StartGateway

MODEL = "small"
CHAT = "/v1/chat/completions"


FAST = BatchLimits(renew_s=0.1, pump_s=0.02, lost_after_s=1.0)
"""What is waited for in seconds elsewhere takes moments."""


@pytest.fixture
def start_gateway(start_gateway: StartGateway) -> StartGateway:
    return partial(start_gateway, batch_limits=FAST)


def openai_client(port: int, key: str = "none") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0, timeout=WAIT_S)


def line(number: int, **body: Any) -> dict[str, Any]:
    content = {"model": MODEL, "messages": [{"role": "user", "content": f"hello {number}"}], **body}
    return {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": content}


def jsonl(lines: Iterable[Any]) -> bytes:
    return b"".join((each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in lines)


async def submit(client: AsyncOpenAI, lines: Iterable[Any], **fields: Any) -> Batch:
    file = await client.files.create(file=("in.jsonl", io.BytesIO(jsonl(lines))), purpose="batch")
    options: dict[str, Any] = {"endpoint": CHAT, "completion_window": "24h", **fields}
    return await client.batches.create(input_file_id=file.id, **options)


async def ended(client: AsyncOpenAI, id: str) -> Batch:
    final = {"completed", "failed", "expired", "cancelled"}
    return await until_response(lambda: client.batches.retrieve(id), lambda batch: batch.status in final)


async def results(client: AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    content = await client.files.content(file_id)
    return [json.loads(each) for each in content.read().splitlines()]
