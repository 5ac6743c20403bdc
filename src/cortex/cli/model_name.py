"""The type of arguments that name a model: a shell completes them from the gateway's list."""

from __future__ import annotations

import os

import click
from click.shell_completion import CompletionItem

from cortex.cli.client import DEFAULT_URL, GatewayClient
from cortex.cli.failures import CommandError

_TIMEOUT_S = 1.0
"""Time limit of the list, for which the user waits."""


class ModelName(click.types.StringParamType):
    name = "model"

    def shell_complete(
        self,
        ctx: click.Context,
        param: click.Parameter,  # noqa: ARG002
        incomplete: str,
    ) -> list[CompletionItem]:
        """The models of the gateway that begin so; none where no gateway responds."""
        url = ctx.params.get("url") or os.environ.get("CORTEX_URL") or DEFAULT_URL
        try:
            listed = GatewayClient(str(url), os.environ.get("CORTEX_API_KEY"), _TIMEOUT_S).get("/v1/models")
        except CommandError:
            return []
        names = [str(entry.get("id", "")) for entry in listed.get("data", ())]
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]


MODEL = ModelName()
