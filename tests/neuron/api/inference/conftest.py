"""The official SDKs as clients of the node under test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest


@pytest.fixture
async def openai_client(api: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(api_key="k", base_url=api.url + "/v1", max_retries=0) as client:
        yield client


@pytest.fixture
async def anthropic_client(api: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(api_key="k", base_url=api.url, max_retries=0) as client:
        yield client
