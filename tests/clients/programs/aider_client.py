"""Aider edits a file as the model says. It runs as a command, with the options of its documentation."""

import subprocess
import sys
import tempfile
from pathlib import Path

from report import KEY, MODEL, URL, equal, report


def edit() -> None:
    folder = Path(tempfile.mkdtemp())
    (folder / "hello.py").write_text("# empty\n")
    options = ["--no-git", "--yes-always", "--no-check-update", "--no-show-model-warnings", "--analytics-disable"]
    server = ["--model", f"openai/{MODEL}", "--openai-api-base", f"{URL}/v1", "--openai-api-key", KEY]
    command = [str(Path(sys.executable).parent / "aider"), *server, *options, "--edit-format", "whole"]
    done = subprocess.run(
        [*command, "--message", "Rewrite hello.py.", "hello.py"],
        cwd=folder,
        env={"HOME": str(folder), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    if done.returncode:
        raise AssertionError(done.stdout + done.stderr)
    equal((folder / "hello.py").read_text(), "print('scripted')\n")


report({"edit": edit})
