"""The node's background tasks go on after failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from faulty_models import parts, running_node

from ...waiting import until


async def test_sampling_goes_on_after_failures_and_shows_as_degraded(tmp_path: Path) -> None:
    read = parts().read_devices
    broken = True

    def read_devices(*arguments: Any) -> Any:
        if broken:
            raise RuntimeError("a bug")
        return read(*arguments)

    async with running_node(tmp_path, read_devices=read_devices) as node:
        assert node.health().status == "ok"
        await until(lambda: node.health().status != "ok")
        assert node.health().status == "degraded"
        assert node.health().failing_tasks == ("sample devices",)
        broken = False
        restarts = node.task_restarts()["sample devices"]
        await until(lambda: node.task_restarts()["sample devices"] > restarts)


async def test_bug_in_one_load_leaves_the_other_default_models(tmp_path: Path) -> None:
    def fetch(*arguments: Any) -> Any:
        raise RuntimeError("a bug")

    config = {"default_models": [{"id": "org/one"}, {"id": "org/two"}]}
    async with running_node(tmp_path, config, fetch=fetch) as node:
        await until(lambda: node.health().activation.state == "done")
        assert node.health().activation.failed == ("org/one", "org/two")
