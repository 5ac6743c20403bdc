"""Aider chats, whole and streamed, and edits a file as the model says. It has neither tools nor structured output, and
runs as a command, with the options of its documentation."""

import subprocess
import sys
import tempfile
from pathlib import Path

from report import GREETING, KEY, MODEL, URL, equal, report


def run(folder: Path, *arguments: str) -> str:
    options = ["--no-git", "--yes-always", "--no-check-update", "--no-show-model-warnings", "--analytics-disable"]
    server = ["--model", f"openai/{MODEL}", "--openai-api-base", f"{URL}/v1", "--openai-api-key", KEY]
    done = subprocess.run(
        [str(Path(sys.executable).parent / "aider"), *server, *options, *arguments],
        cwd=folder,
        env={"HOME": str(folder), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    if done.returncode:
        raise AssertionError(done.stdout + done.stderr)
    return done.stdout


def chat(*arguments: str) -> None:
    written = run(Path(tempfile.mkdtemp()), "--chat-mode", "ask", "--no-pretty", *arguments, "--message", "Hello")
    equal(GREETING in written, True)


def edit() -> None:
    folder = Path(tempfile.mkdtemp())
    (folder / "hello.py").write_text("# empty\n")
    run(folder, "--edit-format", "whole", "--message", "Rewrite hello.py.", "hello.py")
    equal((folder / "hello.py").read_text(), "print('scripted')\n")


report({"chat": lambda: chat("--no-stream"), "stream": chat, "edit": edit})
