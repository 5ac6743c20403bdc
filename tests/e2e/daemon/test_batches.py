"""A batch over real daemons that die: the gateway in the middle of it, then one of two neurons."""

from __future__ import annotations

import io
import json
import time
from typing import TYPE_CHECKING, Any

import openai
import pytest

from cortex.gateway.ledger.keys import as_toml

from ...ports import free_port
from ...waiting import WAIT_S
from .conftest import WIDE
from .test_fleet import KEY, Fleet

if TYPE_CHECKING:
    from .conftest import StartDaemon

pytestmark = pytest.mark.e2e

NUM_LINES = 16
NUM_TOKENS = 24
"""Of one response: none ends by itself."""


def line(number: int) -> dict[str, Any]:
    body = {"model": WIDE, "prompt": f"number {number}", "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body}


def test_every_line_has_one_result_although_gateway_and_node_are_killed(
    start_daemon: StartDaemon, tmp_path_factory: pytest.TempPathFactory, loads_wide: str
) -> None:
    nodes = {name: start_daemon("[limits]", "max_num_seqs = 2", loads_wide, waits=False) for name in ("one", "two")}
    folder, port = tmp_path_factory.mktemp("batches"), free_port()
    neurons = "".join(f'[[neurons]]\nname = "{name}"\nendpoint = "{node.url}"\n' for name, node in nodes.items())
    (folder / "cortex.toml").write_text(
        f'[gateway]\nlisten = "127.0.0.1:{port}"\nmetrics_listen = "127.0.0.1:{free_port()}"\npoll_interval_s = 0.2\n'
        f"{neurons}{as_toml(KEY.section)}"
    )
    fleet = Fleet(folder, port, nodes)
    fleet.start()
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY.text, max_retries=0, timeout=WAIT_S)
    content = "".join(json.dumps(line(number)) + "\n" for number in range(NUM_LINES)).encode()
    file = client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")
    id = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h").id

    def wait_for(num_lines: int) -> Any:
        deadline_s = time.monotonic() + WAIT_S
        while True:
            batch = client.batches.retrieve(id)
            assert batch.request_counts is not None
            if batch.request_counts.completed >= num_lines and (num_lines < NUM_LINES or batch.status == "completed"):
                return batch
            assert time.monotonic() < deadline_s, batch
            time.sleep(0.02)

    wait_for(1)
    fleet.kill()
    fleet.start()
    wait_for(NUM_LINES // 3)
    nodes["one"].process.kill()
    batch = wait_for(NUM_LINES)

    found = [json.loads(each) for each in client.files.content(batch.output_file_id).read().splitlines()]
    assert sorted(each["custom_id"] for each in found) == sorted(f"line-{number}" for number in range(NUM_LINES))
    used = fleet.get("/fleet/usage?by=key")["rows"][0]
    assert used["requests"] == NUM_LINES
    assert used["completion_tokens"] == sum(each["response"]["body"]["usage"]["completion_tokens"] for each in found)
    fleet.kill()
