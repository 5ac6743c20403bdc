"""When a node suspends its host, and what keeps it awake."""

import os
from pathlib import Path

import pytest
from faulty_models import models, running_node

from cortex.neuron.weights.hub.cache import RepositoryCache
from cortex.wire.errors import ModelInUse, ModelUnsupported

from ...waiting import until
from ..generations import Reader
from .node_calls import load, request, tokens_of


async def test_node_suspends_its_host_once_nothing_runs_and_nobody_reads_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asleep, blob = tmp_path / "asleep", tmp_path / "blob"
    blob.touch()
    config = {**models(tmp_path, m={}), "suspend_command": ["touch", str(asleep)]}
    async with running_node(tmp_path, config) as node:
        await load(node)
        running = Reader(node.generate("m", request("one", max_tokens=300)))
        await anext(running)
        with pytest.raises(ModelInUse, match="m has requests"):
            node.suspend()
        await tokens_of(running)

        monkeypatch.setattr(node.files, "_shared_repository", lambda name: RepositoryCache(tmp_path, name))
        monkeypatch.setattr(RepositoryCache, "open_blob", lambda *_: os.open(blob, os.O_RDONLY))
        with (
            node.files.shared_file("a/b", "digest"),
            pytest.raises(ModelInUse, match="another node downloads"),
        ):
            node.suspend()

        assert not asleep.exists()
        node.suspend()
        await until(asleep.exists)


async def test_node_without_a_command_is_never_suspended(tmp_path: Path) -> None:
    async with running_node(tmp_path, {**models(tmp_path, m={}), "suspend_command": []}) as node:
        with pytest.raises(ModelUnsupported, match="suspend_command"):
            node.suspend()
