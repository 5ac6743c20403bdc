"""`cortex launch`: a coding agent with the variables that send its requests to this gateway."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from cortex.cli.client import GatewayClient, gateway_options
from cortex.cli.failures import Command, CommandError, ExitCode
from cortex.cli.model_name import MODEL
from cortex.cli.output import console

NO_KEY = "any"
"""Agents insist on a key; a gateway without keys accepts every one."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How an agent is started."""

    program: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def planned(agent: str, url: str, key: str, model: str) -> Launch:
    """The command of an agent that is to use `model` at `url`."""
    openai = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key}
    match agent:
        case "claude":
            names = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")
            return Launch(
                "claude",
                environment={
                    "ANTHROPIC_BASE_URL": url,
                    "ANTHROPIC_AUTH_TOKEN": key,
                    **dict.fromkeys(names, model),
                    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                },
            )
        case "codex":
            provider = (
                f'model_providers.cortex={{name="cortex", base_url="{url}/v1", env_key="CORTEX_AGENT_KEY", '
                'wire_api="responses"}'
            )
            options = ("-c", provider, "-c", 'model_provider="cortex"', "-m", model)
            return Launch("codex", options, {"CORTEX_AGENT_KEY": key})
        case "opencode":
            settings: dict[str, Any] = {
                "provider": {
                    "cortex": {
                        "npm": "@ai-sdk/openai-compatible",
                        "name": "cortex",
                        "options": {"baseURL": f"{url}/v1", "apiKey": key},
                        "models": {model: {}},
                    }
                },
                "model": f"cortex/{model}",
            }
            return Launch("opencode", environment={"OPENCODE_CONFIG_CONTENT": json.dumps(settings)})
        case _:
            return Launch("aider", ("--model", f"openai/{model}"), {**openai, "OPENAI_API_BASE": f"{url}/v1"})


def suitable(models: Sequence[Mapping[str, Any]]) -> str | None:
    """The model for an agent: one with tools, loaded rather than not, with the longest context."""

    def rank(entry: Mapping[str, Any]) -> tuple[bool, bool, int]:
        capabilities = entry.get("capabilities") or {}
        return bool(capabilities.get("tools")), bool(entry.get("loaded")), int(entry.get("max_model_len") or 0)

    chat = [entry for entry in models if (entry.get("capabilities") or {}).get("chat", True)]
    best = max(chat, key=rank, default=None)
    return None if best is None else str(best["id"])


@click.command(cls=Command, context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]})
@click.argument("agent", type=click.Choice(("claude", "codex", "opencode", "aider")))
@click.option("--model", type=MODEL, help="The model to use. [default: a loaded one with tools]")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@gateway_options
def launch(agent: str, model: str | None, arguments: tuple[str, ...], gateway: GatewayClient) -> None:
    """Start a coding agent that uses this gateway.

    Further arguments go to the agent.

    \b
      cortex launch claude
      cortex launch codex --model Qwen/Qwen3-30B-A3B-GGUF
      cortex launch aider -- --yes README.md
    """
    models = gateway.get("/v1/models")["data"]
    chosen = model or suitable(models)
    if chosen is None:
        raise CommandError("the gateway has no model", "load one with `cortex pull` or `cortex up`", ExitCode.NOT_FOUND)
    plan = planned(agent, gateway.url, gateway.api_key or NO_KEY, chosen)
    program = shutil.which(plan.program)
    if program is None:
        raise CommandError(f"{plan.program} is not installed", "install it, or check PATH", ExitCode.NOT_FOUND)
    console().print(f"{agent} with {chosen} at {gateway.url}", soft_wrap=True)
    os.execve(program, [program, *plan.arguments, *arguments], {**os.environ, **plan.environment})
