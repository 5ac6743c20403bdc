"""Plans between the workers of one host, through the private directory of the load."""

from __future__ import annotations

import queue
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from cortex.neuron.engine.errors import GroupBroken
from cortex.neuron.engine.request import RankSpec
from cortex.neuron.engine.scheduling.step_plan import StepPlan
from cortex.neuron.worker.program.step_link import FollowerLink, LeaderLink

from ....waiting import WAIT_S

PLAN = StepPlan((), 0, (), ())


def test_every_rank_gets_the_plan_also_in_a_directory_with_a_long_path(tmp_path: Path) -> None:
    directory = tmp_path / ("long" * 40)
    directory.mkdir()
    leader = LeaderLink(RankSpec(0, 3, str(directory)), lambda: None)
    plans: queue.SimpleQueue[StepPlan] = queue.SimpleQueue()
    followers = [FollowerLink(RankSpec(rank, 3, str(directory)), plans.put, lambda: None) for rank in (1, 2)]
    for follower in followers:
        follower.open()
    leader.announce(PLAN)
    assert [plans.get(timeout=WAIT_S).rows for _ in followers] == [(), ()]
    for follower in followers:
        follower.close()
    leader.close()


def test_rank_that_never_connects_breaks_the_group(tmp_path: Path) -> None:
    leader = LeaderLink(RankSpec(0, 2, str(tmp_path)), lambda: None, accept_s=0.05)
    with pytest.raises(GroupBroken, match="does not take the next step"):
        leader.announce(PLAN)
    leader.close()


def test_leader_without_the_locks_of_its_devices_does_not_keep_listening(tmp_path: Path) -> None:
    rank = RankSpec(0, 2, str(tmp_path))
    with pytest.raises(FileNotFoundError):
        LeaderLink(replace(rank, device_locks=(str(tmp_path / "absent"),)), lambda: None)
    for thread in threading.enumerate():
        if thread.name == "arrivals":
            thread.join(WAIT_S)
            assert not thread.is_alive()
    with pytest.raises(ConnectionRefusedError):
        FollowerLink(replace(rank, rank=1), lambda _: None, lambda: None).open()
