"""`cortex run`: download and load a model if necessary, then chat with it."""

from __future__ import annotations

import click

from cortex.cli import fleet_view
from cortex.cli.client import GatewayClient, GatewayRejected, gateway_options, model_path
from cortex.cli.commands.chat import conversation_options, converse
from cortex.cli.commands.files import start_pull
from cortex.cli.failures import Command, CommandError
from cortex.cli.model_name import MODEL
from cortex.cli.views.jobs import follow
from cortex.formats.quant_names import is_same_quant
from cortex.wire.model_names import split_quant
from cortex.wire.node.protocol import ModelState


@click.command(cls=Command)
@click.argument("model", type=MODEL, metavar="MODEL[:QUANT]")
@click.argument("prompt", required=False)
@click.option("--node", help="Node to load it on. [default: the gateway chooses]")
@conversation_options
@gateway_options
def run(
    model: str,
    prompt: str | None,
    node: str | None,
    system: str | None,
    temperature: float | None,
    max_tokens: int | None,
    gateway: GatewayClient,
) -> None:
    """Load a model, downloaded if necessary, and chat with it.

    MODEL is a model of the catalogue or a hub id. With a PROMPT or piped input, prints one response.

    \b
      cortex run unsloth/Qwen3-8B-GGUF:Q4_K_M
    """
    name, quant = split_quant(model)
    if quant is not None:
        _reject_another_quant(gateway, name, quant)
    if quant is not None or not _is_known(gateway, name):
        follow(gateway, start_pull(gateway, model, (node,) if node else ()))
    body = {"wait": False} if node is None else {"wait": False, "node": node}
    follow(gateway, gateway.post(model_path(name, "load"), body)["job"])
    converse(gateway, name, prompt, system, temperature, max_tokens)


def _reject_another_quant(gateway: GatewayClient, name: str, quant: str) -> None:
    """Rejects a quantisation other than the one in memory, because the request would get the loaded one."""
    for place, held in fleet_view.fetch(gateway).places(name):
        if held.state is not ModelState.FAILED and not is_same_quant(quant, held.requested_quant, held.quant):
            raise CommandError(
                f"{name} is in memory on {place.name} as {held.quant or 'dense weights'}, not as {quant}",
                f"unload it first with `cortex unload {name}`, or leave out :{quant}",
            )


def _is_known(gateway: GatewayClient, name: str) -> bool:
    try:
        gateway.get(f"/v1/models/{name}")
    except GatewayRejected as rejected:
        if rejected.code == "model_not_found":
            return False
        raise
    return True
