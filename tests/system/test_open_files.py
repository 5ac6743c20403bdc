from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from cortex.system import open_files
from cortex.system.open_files import Connections

RAISE = """
import resource
from cortex.system import open_files
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (100, min(hard, 300) if hard > 0 else 300))
open_files.raise_limit()
print(open_files.limit())
"""


def test_raises_the_soft_limit_to_the_hard_one() -> None:
    found = subprocess.run([sys.executable, "-c", RAISE], capture_output=True, text=True, check=True)
    assert int(found.stdout) == 300


@pytest.mark.parametrize(
    ("num_files", "files_each", "per_client", "expected"),
    [
        (1 << 20, 2, None, Connections(8192, 2048)),
        (1024, 2, None, Connections(384, 96)),
        (1024, 1, None, Connections(768, 192)),
        (1024, 2, 1000, Connections(384, 384)),
        (1 << 20, 2, 8192, Connections(8192, 8192)),
        (100, 2, None, Connections(18, 4)),
        (10, 2, None, Connections(1, 1)),
    ],
)
def test_connections_leave_a_reserve_and_one_client_gets_a_share(
    num_files: int, files_each: int, per_client: int | None, expected: Connections, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    found = open_files.connections(num_files, files_each=files_each, one_of=4, in_all=8192, per_client=per_client)
    assert found == expected
    assert found.in_all * files_each + open_files.reserve(num_files) <= max(num_files, 66)
    assert [record.levelname for record in caplog.records] == (["WARNING"] if found.in_all < 8192 else [])


def test_fewer_connections_than_configured_are_no_warning_while_there_are_many(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    assert open_files.connections(20_000, files_each=2, one_of=4, in_all=8192).in_all == 7500
    assert [record.levelname for record in caplog.records] == ["INFO"]
