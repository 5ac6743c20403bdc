"""The commands for backup and restore in the operations guide, run as they are, but for paths and the service."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cortex.gateway.ledger.keys import generate
from cortex.wire.node.protocol import ModelState

from ..fake_neuron import GB
from ..started_gateway import Client

if TYPE_CHECKING:
    from ..fake_neuron import StartNeuron
    from ..started_gateway import StartGateway

GUIDE = Path(__file__).parents[3] / "docs" / "operations.md"
KEY = generate("anna", operator=True)


def run(name: str, folder: Path) -> None:
    """Run the commands after the comment `name` in the guide."""
    found = re.search(rf"<!-- {name} -->\n```sh\n(.*?)```", GUIDE.read_text(), re.S)
    assert found is not None
    script = re.sub(r"^systemctl .*$", "", found[1], flags=re.M)
    places = {
        "/var/backups/cortex": folder / "backup",
        "/var/lib/cortex": folder,
        "/opt/cortex/bin/python": sys.executable,
    }
    for place, here in places.items():
        script = script.replace(place, str(here))
    subprocess.run(["sh", "-euc", script], check=True)


async def num_requests(client: Client) -> int:
    _, body = await client.get("/fleet/usage", Authorization=f"Bearer {KEY.text}")
    return sum(row["requests"] for row in body["rows"])


async def ask(client: Client, **fields: Any) -> Any:
    body = {"model": "a", "input": "hello", **fields}
    status, response = await client.post("/v1/responses", body, Authorization=f"Bearer {KEY.text}")
    return response if status == 200 else status


async def test_restores_what_was_backed_up_while_the_gateway_ran(
    neurons: StartNeuron, start_gateway: StartGateway, tmp_path: Path
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": ModelState.READY})
    gateway = await start_gateway(beast, keys=(KEY.section,))
    await ask(gateway)
    while await num_requests(gateway) != 1:
        pass
    folder = tmp_path / "backup"
    folder.mkdir(mode=0o755)  # by an earlier backup
    run("backup", tmp_path)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())}
    assert modes == {"backup": 0o700, "cortex-spend.db": 0o600, "cortex-responses.db": 0o600}, "others cannot read it"
    await ask(gateway)
    while await num_requests(gateway) != 2:
        pass
    await gateway.gateway.close()
    run("restore", tmp_path)
    for name in ("cortex-spend.db", "cortex-responses.db"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    again = await start_gateway(beast, keys=(KEY.section,))
    assert await num_requests(again) == 1
    await ask(again)
    while await num_requests(again) != 2:
        pass
