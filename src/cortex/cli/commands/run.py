"""`cortex run`: download and load a model if necessary, then chat with it. `pull`, `copy`, `rm`: the files of models on
the disks of nodes. `forget`: what they keep of prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

import click

from cortex.cli import fleet_view
from cortex.cli.client import GatewayClient, GatewayRejected, gateway_options, model_path
from cortex.cli.commands.chat import conversation_options, converse
from cortex.cli.failures import Command, CommandError, ExitCode
from cortex.cli.model_name import MODEL
from cortex.cli.output import answer, console, json_option, print_json, size
from cortex.cli.views import follow, parse_job
from cortex.formats.quant_names import is_same_quant
from cortex.wire.errors import ModelNotFound
from cortex.wire.model_names import split_quant
from cortex.wire.node.load_options import is_path
from cortex.wire.node.protocol import ModelState
from cortex.wire.words import plural


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


@click.command(cls=Command)
@click.argument("model", type=MODEL, metavar="MODEL[:QUANT]")
@click.option(
    "--to",
    "--node",
    "nodes",
    multiple=True,
    help="Node to download to; repeatable. [default: one where the model fits]",
)
@click.option("--wait/--no-wait", default=True, help="Wait until it is done (the default).")
@gateway_options
@json_option
def pull(model: str, nodes: tuple[str, ...], wait: bool, gateway: GatewayClient, as_json: bool) -> None:
    """Download a model without loading it.

    MODEL is a model of the catalogue or a hub id. QUANT selects one of its GGUF files; without such a file, the dense
    weights are downloaded and quantised at load. Nodes copy files from each other and download only the rest from the
    hub. Ctrl-C cancels; a later pull resumes.

    \b
      cortex pull Qwen/Qwen3-8B
      cortex pull unsloth/Qwen3-8B-GGUF:Q4_K_M --to beast --to mini
    """
    _show(gateway, start_pull(gateway, model, nodes), wait=wait, as_json=as_json)


@click.command(cls=Command)
@click.argument("model", type=MODEL, metavar="MODEL[:QUANT]")
@click.argument("nodes", nargs=-1, required=True, metavar="NODE...")
@click.option("--wait/--no-wait", default=True, help="Wait until it is done (the default).")
@gateway_options
@json_option
def copy(model: str, nodes: tuple[str, ...], wait: bool, gateway: GatewayClient, as_json: bool) -> None:
    """Copy a model's files to nodes, from those that have them.

    Nothing comes from the hub, and the nodes need not reach it.
    """
    _show(gateway, start_pull(gateway, model, nodes, copies=True), wait=wait, as_json=as_json)


def _show(gateway: GatewayClient, started: object, *, wait: bool, as_json: bool) -> None:
    job = parse_job(started)
    if wait:
        follow(gateway, gateway.get(f"/fleet/jobs/{job.id}"))
    if as_json:
        print_json(gateway.get(f"/fleet/jobs/{job.id}"))
        return
    what = "is on the disk of" if wait else "is being downloaded to"
    then = "" if wait else f": {job.id}"
    console().print(f"{job.model} {what} {', '.join(job.nodes)}{then}", soft_wrap=True)


def start_pull(gateway: GatewayClient, model: str, nodes: Sequence[str], *, copies: bool = False) -> object:
    """Begin a download; returns its job."""
    name, quant = split_quant(model)
    body = {"model": name, "quant": quant, "nodes": nodes, "copy": copies}
    try:
        return gateway.post("/fleet/pull", {key: value for key, value in body.items() if value})["job"]
    except GatewayRejected as rejected:
        if rejected.code != ModelNotFound.code:
            raise
        remedy = "name a repository of the hub, or a model that `cortex models` lists"
        raise CommandError(rejected.message, remedy, ExitCode.NOT_FOUND) from rejected


@click.command(cls=Command)
@click.argument("model", type=MODEL, metavar="MODEL[:QUANT]")
@click.option("--node", help="Delete only on this node. [default: all nodes]")
@click.option("-y", "--yes", is_flag=True, help="Skip the confirmation.")
@gateway_options
@json_option
def rm(model: str, node: str | None, yes: bool, gateway: GatewayClient, as_json: bool) -> None:
    """Delete a model's files from disks, or a created model.

    A model in memory is not deleted; unload it first. Files outside a node's hub cache are never deleted. Of a model
    that `cortex create` made, the files that were uploaded for it are deleted; what it was made of stays.
    """
    if node is None and model in gateway.get("/fleet/created")["models"]:
        _delete_created(gateway, model, yes=yes, as_json=as_json)
        return
    name, quant = split_quant(model)
    held = {
        place.name: place.files[name]
        for place in fleet_view.fetch(gateway).nodes
        if place.files.get(name) and node in (None, place.name)
    }
    if not held:
        if (source := _outside(gateway, name)) is not None:
            raise CommandError(
                f"the files of {name} are at {source}, outside the nodes' hub caches, and are not deleted",
                "delete them by hand once no node needs them",
            )
        where = f" of {node}" if node else ""
        raise CommandError(f"no disk{where} holds files of {name}", "see `cortex status --json`", ExitCode.NOT_FOUND)
    if not yes:
        places = ", ".join(f"{place} ({size(num_bytes)})" for place, num_bytes in held.items())
        click.confirm(f"Delete {model} from {places}?", abort=True, err=True)
    option = f"?quant={quote(quant, safe='')}" if quant is not None else ""
    deleted = [gateway.delete(f"/fleet/nodes/{quote(place)}/files/{quote(name)}{option}") for place in held]
    if as_json:
        print_json(deleted)
        return
    for each in deleted:
        line = f"{model} deleted from {each['node']}, {size(each['freed_bytes'])} are free again"
        console().print(line, soft_wrap=True)


def _delete_created(gateway: GatewayClient, model: str, *, yes: bool, as_json: bool) -> None:
    if not yes:
        click.confirm(f"Delete {model}? What it was made of stays.", abort=True, err=True)
    deleted = gateway.delete(f"/fleet/created/{quote(model)}")
    answer(deleted, f"{model} deleted", as_json=as_json)


@click.command(cls=Command)
@click.option("--model", help="Only KV of this model.")
@click.option("--key", metavar="NAME_OR_ID", help="Only KV of the prompts of this key.")
@click.option("--group", help="Only KV of the prompts that this group shares.")
@click.option("--tenant", help="Only KV of this tenant, as `cortex keys list --json` printed it: for revoked keys.")
@click.option("--unused-days", type=click.FloatRange(0), help="Only files that were not used for this many days.")
@click.option("--all", "everything", is_flag=True, help="KV of all prompts.")
@click.option("--node", help="Only on this node. [default: all nodes]")
@gateway_options
@json_option
def forget(gateway: GatewayClient, as_json: bool, *, unused_days: float | None, **chosen: object) -> None:
    """Delete what nodes keep of prompts.

    Deletes KV on devices, in host memory and on disk, except that of running requests. Prompts that continue deleted
    ones are computed again.
    """
    unused_s = None if unused_days is None else unused_days * 86400
    given = {name: value for name, value in {**chosen, "unused_s": unused_s}.items() if value not in (None, False)}
    if not given.keys() - {"node"}:
        remedy = "name --model, --key, --group, --tenant or --unused-days, or use --all"
        raise CommandError("nothing is selected", remedy, ExitCode.USAGE)
    nodes = gateway.post("/fleet/forget", given)["nodes"]
    if as_json:
        print_json(nodes)
    failed = [node for node in nodes if node["error"] is not None]
    for node in nodes if not as_json else ():
        more = "" if unused_s is not None else " on disk, and all in memory"
        gone = f"deleted {plural(node['files'], 'file')}, {size(node['bytes'])}{more}"
        console().print(f"{node['node']}: {node['error'] or gone}", soft_wrap=True)
    if failed:
        raise CommandError(
            f"{plural(len(failed), 'node')} deleted nothing", "run this again when they respond", ExitCode.UNREACHABLE
        )


def _outside(gateway: GatewayClient, model: str) -> str | None:
    """Where a model is that a node serves from a path of its own; None for models of the hub."""
    for _, held in fleet_view.fetch(gateway).places(model):
        if held.source is not None and is_path(held.source):
            return held.source
    return None
