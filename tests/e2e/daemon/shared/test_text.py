"""Reads while texts are at work: a tokenizer of 150,000 tokens is built, and a very long prompt is tokenised."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import random
import select
import string
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ....waiting import WAIT_S, wait_until
from ..conftest import TINY
from .conftest import LARGE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..conftest import Daemon

pytestmark = pytest.mark.e2e

SHARE = 0.5
"""A read that waited for concurrent work would take all of its time, not a part."""


class Reads:
    """How long `/health`, `/models` and `/discovery` took, one after the other, for as long as something lasted."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.lasted_s = 0.0

    @property
    def worst_share(self) -> float:
        """The longest read, as a part of all that time."""
        return max(self.seconds) / self.lasted_s


@contextmanager
def reading(daemon: Daemon) -> Iterator[Reads]:
    reads, ended = Reads(), threading.Event()

    def read() -> None:
        connection = http.client.HTTPConnection(daemon.url.removeprefix("http://"), timeout=WAIT_S)
        for path in itertools.cycle(("/health", "/models", "/discovery")):
            began_s = time.monotonic()
            connection.request("GET", path)
            connection.getresponse().read()
            reads.seconds.append(time.monotonic() - began_s)
            if ended.wait(0.005):
                break
        connection.close()

    reader = threading.Thread(target=read)
    reader.start()
    began_s = time.monotonic()
    try:
        yield reads
    finally:
        reads.lasted_s = time.monotonic() - began_s
        ended.set()
        reader.join()


def count(daemon: Daemon, model: str, text: str) -> int:
    body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": text}]}
    status, response = daemon.call("/v1/messages/count_tokens", body)
    assert status == 200, response
    return int(response["input_tokens"])


def worst_shares(daemon: Daemon, text: str, least_tokens: int) -> Iterator[float]:
    """The longest read during each count; counts go on until one is quiet, since a busy machine stalls programs too."""
    for model in LARGE:
        with reading(daemon) as reads:
            assert count(daemon, model, text) > least_tokens
        yield reads.worst_share
        if reads.worst_share < SHARE:
            break


def test_reads_do_not_wait_for_a_large_tokenizer_that_is_being_built(daemon: Daemon) -> None:
    assert min(worst_shares(daemon, "hello", 1)) < SHARE


def test_reads_do_not_wait_for_a_long_prompt_that_is_tokenised(daemon: Daemon) -> None:
    letters = random.Random(7)
    prompt = " ".join("".join(letters.choices(string.ascii_lowercase, k=7)) for _ in range(60_000))
    count(daemon, LARGE[0], "hello")  # its tokenizer is there
    assert min(worst_shares(daemon, prompt, 60_000)) < SHARE


def test_no_tokenizer_is_built_in_the_http_process(daemon: Daemon) -> None:
    def holds_the_library(process_id: int) -> bool:
        return "tokenizers.abi3.so" in Path(f"/proc/{process_id}/maps").read_text()

    count(daemon, TINY, "hello")
    tokenizers = [process_id for process_id, name in daemon.descendants().items() if name == "neuron-tokenize"]
    assert tokenizers
    assert all(map(holds_the_library, tokenizers))
    assert not holds_the_library(daemon.process.pid)


def test_prompt_that_cannot_fit_is_rejected_before_it_is_tokenised(daemon: Daemon) -> None:
    assert daemon.call("/models/load", {"model_id": TINY})[0] == 200
    body = {"model": TINY, "messages": [{"role": "user", "content": "word " * 1_000_000}]}
    status, rejection = daemon.call("/v1/chat/completions", body)
    assert (status, rejection["error"]["code"]) == (400, "context_length_exceeded")
    assert "This model's maximum context length is" in rejection["error"]["message"]
    assert rejection["error"]["prompt_tokens"] > 1_000_000


def test_reads_do_not_wait_for_a_body_of_millions_of_arrays(daemon: Daemon) -> None:
    body = b'{"model": "tiny", "extra": [' + b"[]," * 2_000_000 + b"0]}"
    address = daemon.url.removeprefix("http://")

    def worst_share() -> float:
        with reading(daemon) as reads:
            connection = http.client.HTTPConnection(address, timeout=WAIT_S)
            connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
            assert connection.getresponse().status == 400
        return reads.worst_share

    assert any(worst_share() < SHARE for _ in LARGE)


def test_long_texts_do_not_delay_a_short_one_and_end_when_their_clients_disconnect(daemon: Daemon) -> None:
    niceness = os.getpriority(os.PRIO_PROCESS, daemon.process.pid)

    def is_busy_in_background(process_id: int) -> bool:
        try:
            state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
            return state == "R" and os.getpriority(os.PRIO_PROCESS, process_id) > niceness
        except OSError:
            return False  # it has ended

    def busy_in_background() -> set[int]:
        """Workers that tokenise a long text now: they have a lower priority, and compute."""
        workers = {process_id for process_id, name in daemon.descendants().items() if name == "neuron-tokenize"}
        return set(filter(is_busy_in_background, workers))

    count(daemon, LARGE[0], "hello")  # its tokenizer is there
    turns = [{"role": "user", "content": "some words " * 600_000}]
    body = json.dumps({"model": LARGE[0], "max_tokens": 1, "messages": turns}).encode()
    clients = [http.client.HTTPConnection(daemon.url.removeprefix("http://"), timeout=WAIT_S) for _ in range(4)]
    for client in clients:
        client.request("POST", "/v1/messages/count_tokens", body, {"content-type": "application/json"})
    wait_until(busy_in_background)
    assert count(daemon, LARGE[0], "hello") > 1
    assert not all(select.select([client.sock], [], [], 0)[0] for client in clients)
    busy = wait_until(busy_in_background)
    for client in clients:
        client.close()
    wait_until(lambda: not busy & daemon.descendants().keys())  # they were killed, not only done
