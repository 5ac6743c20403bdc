"""`cortex load`, `unload`, `pin`, `unpin`, `move`, `forget-size`: control of models by hand. `explain` and `fits`: the
placement decision for a model, with the bytes behind it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import click
from rich.console import Console
from rich.text import Text

from cortex.cli import fleet_view
from cortex.cli.client import GatewayClient, GatewayRejected, gateway_options, model_path
from cortex.cli.failures import Command, CommandError, ExitCode
from cortex.cli.model_name import MODEL
from cortex.cli.output import answer, console, json_option, print_json, rate, say, size, table
from cortex.cli.views import context_of, follow, parse_bench, parse_job, show_bench, when_measured
from cortex.formats.quant_names import is_same_quant
from cortex.wire.model_names import split_quant
from cortex.wire.node.protocol import ModelState
from cortex.wire.words import about, plural

node_option = click.option("--node", help="Node to act on. [default: the gateway chooses]")
wait_option = click.option("--wait/--no-wait", default=True, help="Wait until it is done (the default).")
dry_run_option = click.option("--dry-run", is_flag=True, help="Show what would be loaded and evicted; change nothing.")


@click.command(cls=Command)
@click.argument("model", type=MODEL)
@click.option("--profile", is_flag=True, help="MODEL is a profile of models.toml: load all of its models.")
@node_option
@dry_run_option
@wait_option
@gateway_options
@json_option
def load(
    model: str, profile: bool, node: str | None, dry_run: bool, wait: bool, gateway: GatewayClient, as_json: bool
) -> None:
    """Load a model, or those of a profile. Ctrl-C cancels the load."""
    if profile:
        if node is not None or dry_run:
            raise CommandError("a profile takes neither --node nor --dry-run", "load its models one by one")
        _load_profile(gateway, model, wait=wait, as_json=as_json)
        return
    order(gateway, model, "load", "is ready on", node=node, dry_run=dry_run, wait=wait, as_json=as_json)


@click.command(cls=Command)
@click.argument("model", type=MODEL)
@node_option
@dry_run_option
@wait_option
@gateway_options
@json_option
def pin(model: str, node: str | None, dry_run: bool, wait: bool, gateway: GatewayClient, as_json: bool) -> None:
    """Keep a model loaded and never evict it.

    The pin lasts until `cortex unpin`: the model is loaded again after a restart of its node or of the gateway.
    """
    order(gateway, model, "pin", "is pinned on", node=node, dry_run=dry_run, wait=wait, as_json=as_json)


@click.command(cls=Command)
@click.argument("model", type=MODEL)
@click.option("--node", help="Unload only from this node. [default: all nodes]")
@click.option("--force", is_flag=True, help="Cancel its running requests instead of waiting for them.")
@click.option(
    "--sleep", is_flag=True, help="Keep the weights in host memory if there is room; it wakes faster than it loads."
)
@click.option("-y", "--yes", is_flag=True, help="Unload it even if it is pinned, and unpin it.")
@click.option("--dry-run", is_flag=True, help="Show where it would be unloaded, and what runs there; change nothing.")
@wait_option
@gateway_options
@json_option
def unload(
    model: str,
    node: str | None,
    force: bool,
    sleep: bool,
    yes: bool,
    dry_run: bool,
    wait: bool,
    gateway: GatewayClient,
    as_json: bool,
) -> None:
    """Unload a model from every node, or from one.

    Waits for running requests unless --force is given. Asks before it unloads a pinned model.
    """
    if dry_run:
        _preview_unload(gateway, model, node, as_json)
        return
    body = _body(node=node, force=force or None, sleep=sleep or None, unpin=yes or None, wait=False)
    response = _post_unload(gateway, model, body)
    if wait:
        response["job"] = _ended(gateway, response)
    if as_json:
        print_json(response)
        return
    asleep = [
        place.name
        for place, status in fleet_view.fetch(gateway).places(response["model"])
        if status.state is ModelState.ASLEEP
    ]
    places = ", ".join(f"{name} (asleep)" if name in asleep else name for name in response["nodes"])
    say(f"{response['model']} {'unloaded' if wait else 'is being unloaded'}: {places}")


@click.command(cls=Command)
@click.argument("model", type=MODEL)
@gateway_options
@json_option
def unpin(model: str, gateway: GatewayClient, as_json: bool) -> None:
    """Let a model be evicted again."""
    response = gateway.post(model_path(model, "unpin"), {})
    answer(response, f"{response['model']} is no longer pinned", as_json=as_json)


@click.command(cls=Command)
@click.argument("model", type=MODEL)
@click.option("--node", help="Only on this node. [default: all that have the model]")
@gateway_options
@json_option
def forget_size(model: str, node: str | None, gateway: GatewayClient, as_json: bool) -> None:
    """Discard the measured size of a model.

    It is placed by estimates again until its next load is measured. Use this if a model is rejected because it once
    took more than usual.
    """
    response = gateway.delete(model_path(model, "size") + (f"?node={quote(node, safe='')}" if node else ""))
    if as_json:
        print_json(response)
        return
    for place in response["nodes"]:
        if place["error"] is not None:
            say(f"{place['node']}: {place['error']}")
        else:
            expected = place["estimate_bytes"]
            size_now = f"counts as {size(expected)} from now on" if expected else "has no size from now on"
            say(f"{response['model']} on {place['node']} {size_now}")


@click.command(cls=Command)
@click.argument("model", type=MODEL)
@click.argument("node")
@gateway_options
@json_option
def move(model: str, node: str, gateway: GatewayClient, as_json: bool) -> None:
    """Load a model on NODE, then unload it from the others.

    Requests are served throughout. A pin moves with the model.
    """
    fleet = fleet_view.fetch(gateway)
    response = gateway.post(model_path(model, "load"), {"node": node, "wait": False})
    name = response["model"]
    before = [(place.name, held) for place, held in fleet.places(name) if place.name != node]
    response["job"] = _ended(gateway, response)
    if any(held.pinned_by == "operator" for _, held in before):
        follow(gateway, gateway.post(model_path(name, "pin"), {"node": node, "wait": False})["job"])
    left = [place for place, held in before if held.state not in (ModelState.COLD, ModelState.FAILED)]
    for place in left:
        follow(gateway, gateway.post(model_path(name, "unload"), {"node": place, "unpin": True, "wait": False})["job"])
    line = f"{name} is ready on {node}" + (f"; unloaded from {', '.join(left)}" if left else "")
    answer({"model": name, "node": node, "unloaded_from": left}, line, as_json=as_json)


def order(
    gateway: GatewayClient,
    model: str,
    action: str,
    result: str,
    *,
    node: str | None,
    dry_run: bool,
    wait: bool,
    as_json: bool,
) -> None:
    """Send an order that starts a job, and follow the job if `wait`."""
    if dry_run:
        decision = gateway.post(model_path(model, action), _body(node=node, dry_run=True))
        if as_json:
            print_json(decision)
        else:
            show_decision(console(), decision)
        return
    response = gateway.post(model_path(model, action), _body(node=node, wait=False))
    if wait:
        response["job"] = _ended(gateway, response)
    if as_json:
        print_json(response)
        return
    places = ", ".join(response["nodes"]) or "no node"
    if wait:
        say(f"{response['model']} {result} {places}{_context(gateway, response['model'], response['nodes'])}")
    else:
        say(f"{action} of {response['model']} on {places} has begun: {parse_job(response['job']).id}")


def _load_profile(gateway: GatewayClient, name: str, *, wait: bool, as_json: bool) -> None:
    response = gateway.post(f"/fleet/profiles/{quote(name, safe='')}/load", {})
    failures: dict[str, CommandError] = {}
    for order in response["models"]:
        try:
            if wait or order["job"]["state"] == "failed":
                order["job"] = _ended(gateway, order)
        except CommandError as error:
            failures[order["model"]] = error
            order["job"] = gateway.get(f"/fleet/jobs/{order['job']['id']}")
            continue
        if not as_json:
            say(f"{order['model']} {'is ready' if wait else 'is being loaded'} on {', '.join(order['nodes'])}")
    if as_json:
        print_json(response)
    if failures:
        first = next(iter(failures.values()))
        problems = "; ".join(about(model, error.message) for model, error in failures.items())
        raise CommandError(problems, first.remedy, first.exit_code)


def _context(gateway: GatewayClient, model: str, nodes: Sequence[str]) -> str:
    """The context of a model that was loaded on `nodes`, where they report it."""
    places = fleet_view.fetch(gateway).places(model)
    found = [held for node, held in places if node.name in nodes and held.state is ModelState.READY]
    contexts = [f"context {context_of(held)} tokens" for held in found if context_of(held)]
    return f": {', '.join(dict.fromkeys(contexts))}" if contexts else ""


def _preview_unload(gateway: GatewayClient, model: str, node: str | None, as_json: bool) -> None:
    """The effect of an unload, one line per node."""
    response = gateway.post(model_path(model, "unload"), _body(node=node, dry_run=True))
    if as_json:
        print_json(response)
        return
    for name in response["nodes"]:
        running = response["in_flight"].get(name, 0)
        notes = [
            f"{plural(running, 'request')} in progress" if running else "idle",
            "pinned, so it asks first" if name in response["pinned_on"] else "",
        ]
        say(f"unload {response['model']} from {name}: {', '.join(filter(None, notes))}")
    if not response["nodes"]:
        say(f"{response['model']} is not loaded on any node")


def _post_unload(gateway: GatewayClient, model: str, body: dict[str, Any]) -> Any:
    """Order the unload; where the model is pinned, ask first."""
    try:
        return gateway.post(model_path(model, "unload"), body)
    except GatewayRejected as rejected:
        if rejected.code != "model_in_use":
            raise
        if not sys.stdin.isatty():
            pinned = rejected.message.partition(";")[0]
            raise CommandError(pinned, "add --yes to unload and unpin it", rejected.exit_code) from rejected
        click.confirm(f"{rejected.message.partition(';')[0]}. Unload and unpin it?", abort=True, err=True)
        return gateway.post(model_path(model, "unload"), body | {"unpin": True})


def _ended(gateway: GatewayClient, response: Any) -> Any:
    """The job of an order, once it has ended."""
    job = follow(gateway, response["job"])
    return gateway.get(f"/fleet/jobs/{job.id}")


def _body(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


@click.command(cls=Command)
@click.argument("model", type=MODEL)
@click.option("--history", is_flag=True, help="Show past decisions about it, newest first.")
@gateway_options
@json_option
def explain(model: str, history: bool, gateway: GatewayClient, as_json: bool) -> None:
    """Show what the gateway would do for a model now, and why.

    Lists every node with its verdict, and every device with the memory that the model needs, that it can have, and that
    the node keeps free; how fast the model is there, if `cortex bench` has measured it; and what the node keeps of its
    conversations in host memory. Changes nothing.
    """
    if history:
        decisions = gateway.get(f"/fleet/decisions?model={quote(model, safe='')}")["decisions"]
    else:
        decisions = [gateway.get(f"/fleet/explain/{quote(model, safe='')}")]
    if as_json:
        print_json(decisions if history else decisions[0])
        return
    out = console()
    if not decisions:
        out.print(f"no decision about {model} yet")
    for decision in decisions:
        when = f"{datetime.fromtimestamp(decision['at']):%Y-%m-%d %H:%M:%S}  " if history else ""
        show_decision(out, decision, when)


@click.command(cls=Command)
@click.argument("model", type=MODEL)
@gateway_options
@json_option
def fits(model: str, gateway: GatewayClient, as_json: bool) -> None:
    """Show on which nodes a model fits, and how.

    Lists for each node whether all weights fit on its devices or a part needs host memory, and the expected speed. For
    a repository of the hub that is no model of the gateway, lists where each of its quantisations fits, by the size of
    its files, and where only a mixture of experts would; this needs an operator's key. Exits with code 7 if the model
    fits nowhere. Changes nothing.

    \b
      cortex fits Qwen/Qwen3-8B-GGUF
    """
    try:
        decision = gateway.get(f"/fleet/explain/{quote(model, safe='')}?origin=operator")
    except GatewayRejected as unknown:
        if unknown.status != HTTPStatus.NOT_FOUND:
            raise
        _show_offer(_offer(model, gateway, unknown), model, as_json=as_json)
        return
    if as_json:
        print_json(decision)
    else:
        rows = table("NODE", "FITS", ">DEVICE", ">HOST", ">CONTEXT", ">TOKENS/S")
        for node in decision["nodes"]:
            rows.add_row(*_fit(node))
        console().print(rows)
    is_any_asleep = any(node["verdict"] == "standby" for node in decision["nodes"])
    if decision["action"] == "reject" and not is_any_asleep:
        remedy = f"run `cortex explain {model}` for the bytes of every node"
        raise CommandError(decision["outcome"].removesuffix("."), remedy, ExitCode.NO_ROOM)
    if not as_json:
        console().print(Text(decision["outcome"]), soft_wrap=True)


_FITS = {
    "resident": "is ready",
    "starting": "is starting",
    "asleep": "asleep",
    "standby": "node asleep",
    "fits": "yes",
    "fits_soon": "after an unload",
    "fits_after_eviction": "after eviction",
    "blocked": "later",
    "crowded": "later",
}


def _offer(model: str, gateway: GatewayClient, unknown: GatewayRejected) -> dict[str, Any]:
    """What the hub has of a model that is `unknown` to the gateway; `NAME:QUANT` is one quantisation."""
    try:
        offer: dict[str, Any] = gateway.get(f"/fleet/hub/{quote(model, safe='')}")
    except GatewayRejected as rejected:
        raise (unknown if rejected.status == HTTPStatus.FORBIDDEN else rejected) from None
    repository, quant = split_quant(model)
    if quant is None:
        return offer
    found = [each for each in offer["variants"] if is_same_quant(quant, None, each["quant"])]
    if not found:
        names = ", ".join(_quant_name(each) for each in offer["variants"])
        raise CommandError(f"{repository} has no {quant}", f"name one that it has: {names}", ExitCode.NOT_FOUND)
    return {**offer, "variants": found}


def _quant_name(variant: dict[str, Any]) -> str:
    return variant["quant"] or "safetensors"


def _show_offer(offer: dict[str, Any], model: str, *, as_json: bool) -> None:
    rows = table("QUANT", ">FILES", "FITS ON")
    places: list[str] = []
    for variant in offer["variants"]:
        held = [(node["node"], _offered_fit(node)) for node in variant["nodes"]]
        named = [name if fit == "yes" else f"{name} ({fit})" for name, fit in held if fit is not None]
        places += named
        rows.add_row(_quant_name(variant), _bytes(variant["bytes"]), ", ".join(named) or "no node")
    if as_json:
        print_json(offer)
    else:
        console().print(rows)
    if not places:
        raise CommandError(f"{model} fits nowhere", "choose a smaller model or quantisation", ExitCode.NO_ROOM)


def _offered_fit(node: dict[str, Any]) -> str | None:
    """Whether files fit that no node has read. None: they do not."""
    with_host = "a mixture only, with host memory" if node.get("fits_with_host") else None
    return _FITS.get(node["verdict"], with_host)


def _fit(node: dict[str, Any]) -> tuple[str, ...]:
    host = node.get("host") or {}
    held = _FITS.get(node["verdict"], "no")
    if held in ("no", "later", "node asleep"):
        return node["node"], held, _bytes(node["need_bytes"]), "", "", ""
    is_split = host.get("need_bytes") is not None
    expected, bench = host.get("tokens_per_s"), parse_bench(node.get("bench"))
    speed = f"~{rate(expected)}" if expected else rate(bench.stream_rate) if bench is not None else ""
    tokens = node["context_tokens"]
    return (
        node["node"],
        f"{held}, with host memory" if is_split else held,
        _bytes(node["takes_bytes"]),
        _bytes(host["need_bytes"]) if is_split else "",
        f"{tokens:,}" if tokens else "",
        speed,
    )


def show_decision(out: Console, decision: dict[str, Any], when: str = "") -> None:
    """The outcome, then every node."""
    out.print(Text.assemble((when, "dim"), (decision["outcome"], "bold")), soft_wrap=True)
    for node in decision["nodes"]:
        _show_node(out, node, is_chosen=node["node"] == decision["node"])


def _show_node(out: Console, node: dict[str, Any], *, is_chosen: bool) -> None:
    """The verdict on a line, then the devices and the models on them: readable at 80 columns, whatever the reason."""
    verdict = (node["verdict"].replace("_", " "), "green" if is_chosen else "bold")
    reason = f": {node['reason']}" if node["reason"] else ""
    out.print(Text.assemble((node["node"], "bold"), "  ", verdict, reason), soft_wrap=True)
    if node["devices"]:
        memory = {"TOTAL": "total_bytes", "KEPT FREE": "kept_free_bytes", "HAVE": "have_bytes", "NEED": "need_bytes"}
        if any(device.get("ceiling_bytes") is not None for device in node["devices"]):
            memory = {"TOTAL": "total_bytes", "CEILING": "ceiling_bytes"} | memory
        rows = table("  DEVICE", *(f">{title}" for title in memory))
        for device in node["devices"]:
            rows.add_row(f"  {_device(device)}", *(_bytes(device.get(name)) for name in memory.values()))
        if (host := node.get("host")) is not None:
            rows.add_row("  host memory", *(_bytes(host.get(name)) for name in memory.values()))
        out.print(rows)
    elif node["need_bytes"] is not None:
        out.print(f"  needs {_bytes(node['need_bytes'])}")
    if node.get("ceiling_bytes") is not None:
        out.print(f"  models take at most {_bytes(node['ceiling_bytes'])} of the node")
    if (bench := parse_bench(node.get("bench"))) is not None:
        out.print(f"  {when_measured(bench)}:", soft_wrap=True)
        show_bench(out, bench)
    if (kept := node.get("kv_host")) is not None:
        out.print(f"  {_kept(kept)}", soft_wrap=True)
    for occupant in node["occupants"]:
        leaves = "can be evicted" if occupant["may_leave"] else occupant["reason"]
        host = f" and {_bytes(occupant['host_bytes'])} of host memory" if occupant.get("host_bytes") else ""
        holds = f"  {occupant['model']} holds {_bytes(occupant['bytes'])}{host}: {leaves}"
        out.print(Text(holds, style="dim"), soft_wrap=True)


def _kept(kept: dict[str, Any]) -> str:
    """What the node keeps of the model's KV cache."""
    tokens = f" ({kept['num_tokens']:,} tokens)" if kept.get("num_tokens") else ""
    speed = f", copied back at {rate(kept['tokens_per_s'])} tokens/s" if kept.get("tokens_per_s") else ""
    return f"keeps {size(kept['num_bytes'])} of its KV cache{tokens} in host memory{speed}"


def _device(device: dict[str, Any]) -> str:
    return f"{device['index']}{'*' if device['chosen'] else ''} {device['name']}"


def _bytes(count: int | None) -> str:
    return "" if count is None else size(count)
