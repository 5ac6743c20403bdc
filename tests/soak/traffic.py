"""Clients of a soak: requests of every kind, each with the tokens that its response reported."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import ClientError, ClientSession, ClientTimeout

from .programs import CHAT_MODELS, EMBEDDER

NUM_CLIENTS = 6
REQUEST_S = 120.0
CANCELS = 0.05
PAUSE_S = 0.15
"""Between two requests of one client, on average."""


class Traffic:
    """Runs until it is stopped. Requests that are cancelled have a key of their own: their clients know no usage."""

    def __init__(self, url: str, key: str, cancelling_key: str, chance: random.Random) -> None:
        self._url = url
        self._keys = {False: key, True: cancelling_key}
        self._chance = chance
        self.tokens: Counter[str] = Counter()
        """As responses reported them: `prompt` and `completion`."""
        self.outcomes: Counter[str] = Counter()
        self._shown: set[str] = set()
        """Errors of which one was printed, by status and path."""
        self.unclear: list[str] = []
        """The ids of requests whose responses began and did not end as they should."""
        self.latencies: list[tuple[float, float]] = []
        """When a whole or streamed response of a ready model began, and after how long."""
        self.is_stopped = False

    async def run(self) -> None:
        timeout = ClientTimeout(total=REQUEST_S)
        async with ClientSession(timeout=timeout, read_bufsize=2**20) as session:
            await asyncio.gather(*(self._client(session) for _ in range(NUM_CLIENTS)))

    async def _client(self, session: ClientSession) -> None:
        kinds = [self._chat, self._messages, self._responses, self._completions, self._embeddings]
        while not self.is_stopped:
            kind = self._chance.choice(kinds)
            try:
                await kind(session)
            except (ClientError, TimeoutError, OSError) as problem:
                self.outcomes[f"no response: {type(problem).__name__}"] += 1
            await asyncio.sleep(self._chance.expovariate(1 / PAUSE_S))

    def _model(self) -> str:
        """Mostly the same one for a while, so that models are swapped, but not for every request."""
        favourite = CHAT_MODELS[int(time.monotonic() / 15) % len(CHAT_MODELS)]
        return favourite if self._chance.random() < 0.9 else self._chance.choice(CHAT_MODELS)

    async def _chat(self, session: ClientSession) -> None:
        body = {"model": self._model(), "messages": [{"role": "user", "content": self._words()}]}
        await self._send(session, "/v1/chat/completions", body, _openai_usage, streams={"include_usage": True})

    async def _completions(self, session: ClientSession) -> None:
        body = {"model": self._model(), "prompt": self._words(), "max_tokens": self._chance.randint(1, 24)}
        await self._send(session, "/v1/completions", body, _openai_usage, streams={"include_usage": True})

    async def _messages(self, session: ClientSession) -> None:
        body = {"model": self._model(), "max_tokens": 64, "messages": [{"role": "user", "content": self._words()}]}
        await self._send(session, "/v1/messages", body, _anthropic_usage)

    async def _responses(self, session: ClientSession) -> None:
        body = {"model": self._model(), "input": self._words(), "store": False}
        await self._send(session, "/v1/responses", body, _responses_usage)

    async def _embeddings(self, session: ClientSession) -> None:
        body = {"model": EMBEDDER, "input": [self._words(8) for _ in range(self._chance.randint(1, 4))]}
        await self._send(session, "/v1/embeddings", body, _openai_usage, may_stream=False)

    def _words(self, most: int = 60) -> str:
        words = ("the", "cat", "runs", "fast", "Oslo")
        return " ".join(self._chance.choices(words, k=self._chance.randint(3, most)))

    async def _send(
        self,
        session: ClientSession,
        path: str,
        body: dict[str, Any],
        usage_of: Callable[[Any], tuple[int, int] | None],
        *,
        streams: dict[str, bool] | None = None,
        may_stream: bool = True,
    ) -> None:
        is_stream = may_stream and self._chance.random() < 0.5
        cancels = self._chance.random() < CANCELS
        if is_stream:
            body = body | {"stream": True} | ({"stream_options": streams} if streams else {})
        headers = {"authorization": f"Bearer {self._keys[cancels]}", "content-type": "application/json"}
        begun = time.monotonic()
        async with session.post(self._url + path, data=msgspec.json.encode(body), headers=headers) as response:
            request_id = response.headers.get("x-request-id", "")
            try:
                if cancels:
                    await asyncio.sleep(self._chance.uniform(0, 0.05))
                    self.outcomes["cancelled"] += 1
                    response.close()
                    return
                first = await response.content.readany()
                first_s = time.monotonic() - begun
                content = first + await response.read()
            except (ClientError, TimeoutError, OSError):
                self.unclear.append(request_id)
                raise
            self.outcomes[f"{response.status}"] += 1
            if response.status != 200:
                if (kind := f"{response.status} {path}") not in self._shown:
                    self._shown.add(kind)
                    print(f"{kind}, {body['model']}, {request_id}: {content[:400].decode()}", flush=True)
                return
            found = _last_usage(content, usage_of) if is_stream else usage_of(msgspec.json.decode(content))
            if found is None:  # it failed after it had begun
                self.outcomes["failed in the middle"] += 1
                self.unclear.append(request_id)
                return
            self.tokens["prompt"] += found[0]
            self.tokens["completion"] += found[1]
            if first_s < 5.0:  # what waited for a swap says nothing about the programs
                self.latencies.append((begun, first_s))


def _last_usage(content: bytes, usage_of: Callable[[Any], tuple[int, int] | None]) -> tuple[int, int] | None:
    found = None
    is_failed = False
    for line in content.splitlines():
        if line.startswith(b"data: {"):
            event = msgspec.json.decode(line[6:])
            is_failed = is_failed or ("error" in event and bool(event["error"]))
            found = usage_of(event) or found
    return None if is_failed else found


def _openai_usage(value: Any) -> tuple[int, int] | None:
    usage = value.get("usage")
    return (usage["prompt_tokens"], usage.get("completion_tokens", 0)) if usage else None


def _anthropic_usage(value: Any) -> tuple[int, int] | None:
    if value.get("type") not in ("message", "message_delta"):
        return None
    usage = value["usage"]
    cached = usage.get("cache_read_input_tokens") or 0
    return usage["input_tokens"] + cached, usage["output_tokens"]


def _responses_usage(value: Any) -> tuple[int, int] | None:
    usage = (value.get("response") or value).get("usage")
    return (usage["input_tokens"], usage["output_tokens"]) if usage else None
