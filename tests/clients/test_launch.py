"""Agents that `cortex launch` starts, unmodified: they reach the gateway, and their replies the terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import HERE, ROOT
from .scripted_model import GREETING

TIMEOUT_S = 1800.0
AGENTS = {
    "claude": ["-p", "Say hello."],
    "codex": ["exec", "--skip-git-repo-check", "Say hello."],
    "opencode": ["run", "Say hello."],
    "aider": ["--no-git", "--yes-always", "--no-check-update", "--analytics-disable", "--message", "Say hello."],
}


@pytest.mark.parametrize("agent", AGENTS)
def test_launched_agent_replies(url: str, tmp_path: Path, agent: str) -> None:
    programs = [HERE / "node_modules" / ".bin", HERE / ".venv" / "aider" / "bin"]
    environment = {
        "PATH": os.pathsep.join([*map(str, programs), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT / "src"),
        "HOME": str(tmp_path),
        "CORTEX_URL": url,
    }
    command = [sys.executable, "-m", "cortex.cli.cortex", "launch", agent, "--", *AGENTS[agent]]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert GREETING in done.stdout
