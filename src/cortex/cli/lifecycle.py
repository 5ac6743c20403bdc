"""`cortex load`, `unload`, `pin`, `unpin`: moving models by hand."""

from __future__ import annotations

from typing import Any

import click

from .client import Gateway, gateway_options, model_path
from .failures import Command
from .output import console, json_option, print_json

LOAD_TIMEOUT_S = 3600.0

node_option = click.option("--node", help="The node to act on; the gateway picks when absent.")


@click.command(cls=Command)
@click.argument("model")
@node_option
@gateway_options
@json_option
def load(model: str, node: str | None, gateway: Gateway, as_json: bool) -> None:
    """Bring a model into memory."""
    with console().status(f"loading {model}"):
        answer = gateway.patient(LOAD_TIMEOUT_S).post(model_path(model, "load"), _body(node=node))
    _report(answer, as_json, f"{model} is ready")


@click.command(cls=Command)
@click.argument("model")
@node_option
@click.option("--force", is_flag=True, help="End its running answers instead of waiting for them.")
@gateway_options
@json_option
def unload(model: str, node: str | None, force: bool, gateway: Gateway, as_json: bool) -> None:
    """Free the memory a model takes.

    Everywhere, or on one node; waits for running answers unless forced.
    """
    with console().status(f"unloading {model}"):
        answer = gateway.patient(LOAD_TIMEOUT_S).post(model_path(model, "unload"), _body(node=node, force=force))
    _report(answer, as_json, f"{model} is unloaded")


@click.command(cls=Command)
@click.argument("model")
@node_option
@gateway_options
@json_option
def pin(model: str, node: str | None, gateway: Gateway, as_json: bool) -> None:
    """Keep a model loaded.

    It is brought in if need be, and never makes room for others.
    """
    answer = gateway.patient(LOAD_TIMEOUT_S).post(model_path(model, "pin"), _body(node=node, pinned=True))
    _report(answer, as_json, f"{model} is pinned")


@click.command(cls=Command)
@click.argument("model")
@node_option
@gateway_options
@json_option
def unpin(model: str, node: str | None, gateway: Gateway, as_json: bool) -> None:
    """Let a model make room for others again."""
    answer = gateway.post(model_path(model, "pin"), _body(node=node, pinned=False))
    _report(answer, as_json, f"{model} is no longer pinned")


def _body(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _report(answer: Any, as_json: bool, line: str) -> None:
    if as_json:
        print_json(answer)
    else:
        console().print(line, markup=False)
