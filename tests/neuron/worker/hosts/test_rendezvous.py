"""Where ranks find each other while they load."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from cortex.neuron.worker.hosts.sharded import Rendezvous
from cortex.neuron.worker.model_host import LoadRejected


async def test_ranks_of_one_load_share_a_private_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first, second = Rendezvous(2, "sockets", ("/locks/1", "/locks/4")), Rendezvous(2, "sockets")
    ranks = [first.rank(number) for number in range(2)]
    assert [(rank.rank, rank.size, rank.backend) for rank in ranks] == [(0, 2, "sockets"), (1, 2, "sockets")]
    assert {rank.directory for rank in ranks} == {first.directory}
    assert ranks[0].device_locks == ("/locks/1", "/locks/4")
    assert first.directory != second.directory
    with first:
        assert Path(first.directory).stat().st_mode & 0o777 == 0o700


async def test_without_a_directory_the_load_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(LoadRejected, match="no directory for the ranks"), Rendezvous(2, "sockets"):
        pass
