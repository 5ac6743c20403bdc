"""The `llm` command, configured as its documentation says for OpenAI-compatible servers."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from report import FOR_JSON, GREETING, MODEL, QUESTION, RESULT, SCHEMA, URL, WEATHER, equal, report

home = Path(tempfile.mkdtemp())
(home / "extra-openai-models.yaml").write_text(
    f"- model_id: scripted\n  model_name: {MODEL}\n  api_base: {URL}/v1\n  can_stream: true\n"
    "  supports_tools: true\n  supports_schema: true\n"
)
TOOL = "def get_weather(city: str, days: int) -> str:\n    return f'sunny in {city}'\n"


def run(*arguments: str) -> str:
    command = [str(Path(sys.executable).parent / "llm"), "-m", "scripted", *arguments]
    environment = os.environ | {"LLM_USER_PATH": str(home), "OPENAI_API_KEY": "any"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise AssertionError(done.stderr)
    return done.stdout.strip()


report(
    {
        "chat": lambda: equal(run("--no-stream", QUESTION), GREETING),
        "stream": lambda: equal(run(QUESTION), GREETING),
        "tools": lambda: equal(run("--functions", TOOL, QUESTION), RESULT),
        "structured": lambda: equal(json.loads(run("--schema", json.dumps(SCHEMA), FOR_JSON)), WEATHER.model_dump()),
    }
)
