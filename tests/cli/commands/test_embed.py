"""`cortex embed`."""

from __future__ import annotations

import base64
import json
import struct

from cortex.system.exits import ExitCode

from ..conftest import CannedGateway, Invoke


def encoded(*values: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


def test_shows_similarity_to_the_first_text(gateway: CannedGateway, invoke: Invoke) -> None:
    data = [{"index": 0, "embedding": encoded(3.0, 4.0)}, {"index": 1, "embedding": encoded(4.0, 3.0)}]
    gateway.responses["POST", "/v1/embeddings"] = (200, {"data": data, "usage": {"prompt_tokens": 9}})
    shown = invoke("embed", "m", "one", "two", "--as", "query", "-d", "2")
    assert shown.code == ExitCode.OK
    assert "1.0000" in shown.stdout
    assert "0.9600" in shown.stdout
    assert "2 texts, 9 tokens" in shown.stdout
    assert json.loads(invoke("embed", "m", "--json", stdin="one\n\ntwo\n").stdout)[1]["embedding"] == [4.0, 3.0]


def test_needs_a_text(invoke: Invoke) -> None:
    assert invoke("embed", "m", stdin="\n").code == ExitCode.USAGE
