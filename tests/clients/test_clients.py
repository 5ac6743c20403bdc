"""Clients and frameworks, unmodified, against gateway and node: chat, stream, tools, structured output and
embeddings."""

from __future__ import annotations

import pytest

from .conftest import Run

TASKS = ("chat", "stream", "tools", "structured")


def named(*routes: str, tasks: tuple[str, ...] = TASKS) -> tuple[str, ...]:
    return tuple(f"{route}: {task}" for route in routes for task in tasks)


PROGRAMS: dict[str, tuple[str, ...]] = {
    "openai_python.py": (
        *TASKS,
        *named("responses", tasks=("stream", "tools", "structured", "state", "background")),
    ),
    "anthropic_python.py": (*TASKS, "count"),
    "langchain_client.py": named("chat", "responses", "anthropic", "ollama"),
    "pydantic_ai_client.py": (
        *named("chat", "responses", tasks=(*TASKS, "native structured")),
        "responses: server-side state",
    ),
    "instructor_client.py": ("chat", "tools", "structured by tool", "structured by schema", "stream", "anthropic"),
    "embeddings_client.py": (
        *("openai", "langchain", "langchain: ollama", "llamaindex", "litellm", "litellm: rerank", "ollama"),
    ),
    "litellm_client.py": (
        *named("openai", "anthropic", tasks=(*TASKS, "overflow")),
        *named("ollama"),
        "responses",
    ),
    "openai_agents_client.py": (*named("responses", "chat"), "responses: second turn"),
    "llm_client.py": TASKS,
    "aider_client.py": ("chat", "stream", "edit"),
    "ollama_python.py": (*TASKS, "stream, asynchronous", "generate", "listings", "errors"),
    "ollama_node.mjs": (*TASKS, "generate", "listings", "errors"),
    "openai_node.mjs": (*TASKS, *named("responses", tasks=("state", "background"))),
    "anthropic_node.mjs": TASKS,
    "ai_sdk.mjs": named(
        *("responses", "chat", "compatible", "anthropic"),
        tasks=("chat", "stream", "tools, whole", "tools, streamed", "second turn", "structured"),
    ),
    "langchain_node.mjs": named("chat", "responses", "anthropic", "ollama"),
    "llamaindex_node.mjs": TASKS,
    "agents.mjs": named(*("Claude Code", "Codex", "Qwen Code", "opencode", "pi", "Continue"), tasks=("chat", "tools")),
}


@pytest.mark.parametrize(
    ("program", "task"), [(program, task) for program, tasks in PROGRAMS.items() for task in tasks]
)
def test_client_performs_its_task(run: Run, program: str, task: str) -> None:
    outcome = run(program)[task]
    assert outcome == "passed", outcome


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_task_of_a_program_is_checked(run: Run, program: str) -> None:
    assert set(run(program)) == set(PROGRAMS[program])
