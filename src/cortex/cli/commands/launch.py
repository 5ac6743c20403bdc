"""`cortex launch`: a coding agent with the variables that send its requests to this gateway."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import click

from cortex.cli.client import GatewayClient, gateway_options
from cortex.cli.failures import Command, CommandError, ExitCode
from cortex.cli.model_name import MODEL

_MAX_OUTPUT = 32_000
"""Agents reserve this part of the context for a response."""
NO_KEY = "any"
"""Agents insist on a key; a gateway without keys accepts every one."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How an agent is started."""

    program: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    """Variables of the user that would send the agent elsewhere."""


def planned(agent: str, url: str, key: str, model: str, context_tokens: int | None = None) -> Launch:
    """The command of an agent that is to use `model` at `url`. `context_tokens`: of the model, if it is known."""
    openai = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key}
    match agent:
        case "claude":
            names = ["ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"]
            names += [f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU")]
            return Launch(
                "claude",
                environment={
                    "ANTHROPIC_BASE_URL": url,
                    "ANTHROPIC_AUTH_TOKEN": key,
                    **dict.fromkeys(names, model),
                    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                },
                removed=("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX"),
            )
        case "codex":
            provider = (
                f'model_providers.cortex={{name="cortex", base_url="{url}/v1", env_key="CORTEX_AGENT_KEY", '
                'wire_api="responses"}'
            )
            options: tuple[str, ...] = ("-c", provider, "-c", 'model_provider="cortex"', "-m", model)
            if context_tokens is not None:
                options = ("-c", f"model_context_window={context_tokens}", *options)
            return Launch("codex", options, {"CORTEX_AGENT_KEY": key})
        case "opencode":
            limit = {"context": context_tokens, "output": min(context_tokens, _MAX_OUTPUT)} if context_tokens else None
            settings: dict[str, Any] = {
                "provider": {
                    "cortex": {
                        "npm": "@ai-sdk/openai-compatible",
                        "name": "cortex",
                        "options": {"baseURL": f"{url}/v1", "apiKey": key},
                        "models": {model: {"limit": limit} if limit is not None else {}},
                    }
                },
                "model": f"cortex/{model}",
            }
            return Launch("opencode", environment={"OPENCODE_CONFIG_CONTENT": json.dumps(settings)})
        case _:
            options = ("--model", f"openai/{model}", "--no-show-model-warnings")
            return Launch("aider", options, {**openai, "OPENAI_API_BASE": f"{url}/v1"})


def suitable(models: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The model for an agent: one with tools, loaded rather than not, with the longest context."""

    def rank(entry: Mapping[str, Any]) -> tuple[bool, bool, int]:
        capabilities = entry.get("capabilities") or {}
        return bool(capabilities.get("tools")), bool(entry.get("loaded")), int(entry.get("max_model_len") or 0)

    chat = [entry for entry in models if (entry.get("capabilities") or {}).get("chat", True)]
    return max(chat, key=rank, default=None)


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
    chosen = _chosen(gateway, agent, model)
    name, context = model or str(chosen["id"]), chosen.get("max_model_len")
    plan = planned(agent, gateway.url, gateway.api_key or NO_KEY, name, context)
    program = shutil.which(plan.program)
    if program is None:
        raise CommandError(f"{plan.program} is not installed", "install it, or check PATH", ExitCode.NOT_FOUND)
    click.echo(f"{agent} with {name} at {gateway.url}", err=True)  # standard output is the agent's
    environment = {variable: value for variable, value in os.environ.items() if variable not in plan.removed}
    os.execve(program, [program, *plan.arguments, *arguments], {**environment, **plan.environment})


def _chosen(gateway: GatewayClient, agent: str, model: str | None) -> Mapping[str, Any]:
    """The entry of the model in the gateway's list. Raises CommandError for one that does not exist, or cannot chat."""
    if model is None:
        if (best := suitable(gateway.get("/v1/models")["data"])) is not None:
            return best
        raise CommandError(
            "the gateway has no model for an agent", "load one with `cortex run` or `cortex up`", ExitCode.NOT_FOUND
        )
    entry: Mapping[str, Any] = gateway.get(f"/v1/models/{quote(model, safe='/:@')}")
    capabilities = entry.get("capabilities") or {}
    if not capabilities.get("chat", True):
        raise CommandError(f"{model} cannot chat", "choose another of `cortex models`", ExitCode.USAGE)
    if agent != "aider" and not capabilities.get("tools", True):
        click.echo(f"{model} does not support tools: {agent} can chat, but not edit files or run commands", err=True)
    return entry
