"""`cortex keys`: add, list, change and remove the API keys of clients."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from cortex.cli.client import GatewayClient, gateway_options
from cortex.cli.failures import CommandError, ExitCode, Group, check_environment
from cortex.cli.ledger_source import ask, configuration, ledger
from cortex.cli.model_name import MODEL
from cortex.cli.output import console, json_option, print_json, table
from cortex.gateway.config import Config, load
from cortex.gateway.ledger.groups import CostLeft, cost_id
from cortex.gateway.ledger.key_file import AmbiguousKey, KeyFile, KeyFileError, NameTaken, UnknownKey
from cortex.gateway.ledger.keys import KeySection, as_toml, generate
from cortex.gateway.ledger.limits import MINUTE_S, Spent
from cortex.wire.words import duration

_REMOVABLE = (
    *("model", "requests-per-min", "window-tokens", "balance-tokens"),
    *("window-cost", "balance-cost", "group", "expires"),
)


@click.group(cls=Group)
def keys() -> None:
    """Add, list, change and remove the API keys of clients."""


@keys.command()
@click.argument("name")
@click.option(
    "--model", "models", type=MODEL, multiple=True, help="A model it may use, or a pattern with *; repeat for more."
)
@click.option("--requests-per-min", type=click.IntRange(1), help="Limit of requests per minute.")
@click.option("--window-tokens", type=click.IntRange(0), help="Limit of tokens within the window.")
@click.option("--window-s", type=click.IntRange(60), default=86400, show_default=True, help="Length of the window.")
@click.option("--balance-tokens", type=click.IntRange(0), help="Limit of tokens for the lifetime of the key.")
@click.option("--window-cost", type=click.FloatRange(0), help="Limit of cost within the window, by models.toml.")
@click.option("--balance-cost", type=click.FloatRange(0), help="Limit of cost for the lifetime of the key.")
@click.option("--group", help="The group of [[groups]] whose limits it shares.")
@click.option("--expires", help="When it stops working: a date or time such as 2026-12-31.")
@click.option("--operator", is_flag=True, help="Also allow it to load, unload and pin models, and to manage keys.")
@click.option(
    "-c", "--config", type=click.Path(path_type=Path), help="Add it to this cortex.toml; printed when absent."
)
@click.option("--replace", is_flag=True, help="Replace the key that NAME has: it and its limits are gone.")
@json_option
def add(
    name: str,
    models: tuple[str, ...],
    requests_per_min: int | None,
    window_tokens: int | None,
    window_s: int,
    balance_tokens: int | None,
    window_cost: float | None,
    balance_cost: float | None,
    group: str | None,
    expires: str | None,
    operator: bool,
    config: Path | None,
    replace: bool,
    as_json: bool,
) -> None:
    """Create a key for NAME and show it, once.

    Only its hash is stored. A running gateway accepts it as soon as the file has changed.
    """
    if not name.strip():
        raise CommandError("a key needs a name", "name its owner: cortex keys add anna", ExitCode.USAGE)
    if config is None:
        check_environment()
    try:
        made = generate(
            name,
            models=models,
            requests_per_min=requests_per_min,
            window_tokens=window_tokens,
            window_s=window_s,
            balance_tokens=balance_tokens,
            window_cost=window_cost,
            balance_cost=balance_cost,
            group=group,
            operator=operator,
            expires=expires,
        )
    except ValueError as problem:
        raise click.BadParameter(str(problem), param_hint="--expires") from problem
    if config is not None:
        try:
            KeyFile(config).add(made.section, replace=replace)
        except KeyFileError as problem:
            raise _command_error(problem) from problem
    if as_json:
        print_json({"key": made.text, **msgspec.to_builtins(made.section)})
        return
    out = console()
    out.print(f"{made.text}\n", soft_wrap=True)
    if config is not None:
        out.print(f"Added to {config}. This is the only time the whole key is shown.", soft_wrap=True)
    else:
        out.print("This is the only time the whole key is shown. Put this into cortex.toml:\n")
        out.print(as_toml(made.section), soft_wrap=True)


@keys.command()
@click.argument("key", metavar="NAME_OR_ID")
@click.option(
    "--model", "models", type=MODEL, multiple=True, help="A model it may use, or a pattern with *; repeat for more."
)
@click.option("--requests-per-min", type=click.IntRange(1), help="Limit of requests per minute.")
@click.option("--window-tokens", type=click.IntRange(0), help="Limit of tokens within the window.")
@click.option("--window-s", type=click.IntRange(60), help="Length of the window.")
@click.option("--balance-tokens", type=click.IntRange(0), help="Limit of tokens for the lifetime of the key.")
@click.option("--window-cost", type=click.FloatRange(0), help="Limit of cost within the window, by models.toml.")
@click.option("--balance-cost", type=click.FloatRange(0), help="Limit of cost for the lifetime of the key.")
@click.option("--group", help="The group of [[groups]] whose limits it shares.")
@click.option("--expires", help="When it stops working: a date or time such as 2026-12-31.")
@click.option(
    "--without",
    multiple=True,
    type=click.Choice(_REMOVABLE),
    help="Remove this limit; repeat for more.",
)
@click.option("-c", "--config", type=click.Path(path_type=Path), required=True, help="The cortex.toml to change it in.")
@json_option
def change(
    key: str,
    models: tuple[str, ...],
    without: tuple[str, ...],
    config: Path,
    as_json: bool,
    **limits: float | str | None,
) -> None:
    """Change the limits or the expiry of a key.

    A running gateway uses them as soon as the file has changed. What the key has spent stays counted.
    """
    changes: dict[str, Any] = {name: value for name, value in limits.items() if value is not None}
    if models:
        changes["models"] = models
    for name in without:
        changes |= {"models": ()} if name == "model" else {name.replace("-", "_"): None}
    if not changes:
        raise CommandError("nothing to change", "give a limit, see `cortex keys change -h`", ExitCode.USAGE)
    try:
        section = KeyFile(config).change(key, lambda before: msgspec.structs.replace(before, **changes))
    except KeyFileError as problem:
        raise _command_error(problem) from problem
    except ValueError as problem:
        raise click.BadParameter(str(problem), param_hint="--expires") from problem
    if as_json:
        print_json(section)
    else:
        console().print(f"Changed {section.name} ({section.id}) in {config}.", soft_wrap=True)


@keys.command()
@click.argument("key", metavar="NAME_OR_ID")
@click.option(
    "-c", "--config", type=click.Path(path_type=Path), required=True, help="The cortex.toml to remove it from."
)
@json_option
def remove(key: str, config: Path, as_json: bool) -> None:
    """Remove a key.

    A running gateway rejects it as soon as the file has changed. Its usage stays in the ledger.
    """
    try:
        section, is_one_left = KeyFile(config).remove(key)
    except KeyFileError as problem:
        raise _command_error(problem) from problem
    if as_json:
        print_json({"removed": {"name": section.name, "id": section.id}})
        return
    console().print(f"Removed {section.name} ({section.id}) from {config}.", soft_wrap=True)
    if not is_one_left:
        console().print("No key is left: a gateway that had keys rejects every request, unless gateway.open is set.")


def _command_error(problem: KeyFileError) -> CommandError:
    codes = {UnknownKey: ExitCode.NOT_FOUND, AmbiguousKey: ExitCode.USAGE, NameTaken: ExitCode.USAGE}
    return CommandError(problem.message, problem.remedy, codes.get(type(problem), ExitCode.FAILED))


class KeyRow(msgspec.Struct, frozen=True, kw_only=True):
    """A key without its hash, and what it has left. Unknown fields of a gateway are ignored."""

    name: str
    id: str
    models: tuple[str, ...] = ()
    requests_per_min: int | None = None
    window_tokens: int | None = None
    window_s: int = 86400
    balance_tokens: int | None = None
    operator: bool = False
    expires: str | None = None
    is_expired: bool = False
    balance_left_tokens: int | None = None
    window_left_tokens: int | None = None
    window_cost: float | None = None
    balance_cost: float | None = None
    group: str | None = None
    balance_left_cost: float | None = None
    window_left_cost: float | None = None


@keys.command("list")
@click.option("-c", "--config", type=click.Path(path_type=Path), help="Read the keys of this cortex.toml.")
@gateway_options
@json_option
def list_keys(config: Path | None, gateway: GatewayClient, as_json: bool) -> None:
    """List the keys, with what is left of their budgets.

    With --config, or a cortex.toml in the working directory, the file and its ledger database are read directly, and
    the gateway may be running. Otherwise the gateway is asked: an operator's key lists all keys, another key itself.
    """
    path = configuration(config)
    if path is None:
        rows = msgspec.convert(ask(gateway, "/keys")["keys"], list[KeyRow])
    else:
        loaded = load(path, os.environ)
        rows = _rows(loaded.keys, _spent(loaded, path), time.time())
    if as_json:
        print_json(rows)
        return
    if not rows:
        console().print(
            "no keys: a gateway that never had any admits its own host, another nobody, unless gateway.open is true; "
            "add a key with `cortex keys add NAME`"
        )
        return
    shown = table(
        *("NAME", "ID", "GROUP", "MODELS", "OPERATOR", "EXPIRES"),
        *(">REQUESTS/MIN", ">WINDOW LEFT", ">BALANCE LEFT", ">COST LEFT"),
    )
    for key in rows:
        shown.add_row(
            key.name,
            key.id,
            key.group or "",
            ", ".join(key.models) or ("all" if key.group is None else "of its group"),
            "yes" if key.operator else "",
            f"{key.expires} (expired)" if key.is_expired else key.expires or "",
            str(key.requests_per_min or ""),
            _left(key.window_left_tokens, key.window_tokens, f" in {duration(key.window_s)}"),
            _left(key.balance_left_tokens, key.balance_tokens),
            "; ".join(
                filter(
                    None,
                    (
                        _left(key.window_left_cost, key.window_cost, f" in {duration(key.window_s)}"),
                        _left(key.balance_left_cost, key.balance_cost),
                    ),
                )
            ),
        )
    console().print(shown)


_LISTED = tuple(name for name in KeySection.__struct_fields__ if name in KeyRow.__struct_fields__)


def _spent(config: Config, path: Path) -> Mapping[str, Spent]:
    """What each key has spent; nothing where there is no ledger yet."""
    database = config.database(path.parent)
    if "://" not in database and not Path(database).exists():
        return {}
    first = {key.id: int((time.time() - key.window_s) // MINUTE_S) for key in config.keys}
    windows = first | {cost_id(key): first[key.id] for key in config.keys}
    with ledger(database) as store:
        return store.spent(windows)


def _rows(keys: Iterable[KeySection], spent: Mapping[str, Spent], now: float) -> list[KeyRow]:
    nothing = Spent()

    def cost_left(key: KeySection) -> CostLeft:
        cost = spent.get(cost_id(key), nothing)
        return CostLeft.of(key, sum(cost.by_minute.values()), cost.total)

    return [
        KeyRow(
            **{name: getattr(key, name) for name in _LISTED},
            is_expired=now >= key.expires_at,
            balance_left_tokens=_remaining(key.balance_tokens, spent.get(key.id, nothing).total),
            window_left_tokens=_remaining(key.window_tokens, sum(spent.get(key.id, nothing).by_minute.values())),
            balance_left_cost=cost_left(key).balance,
            window_left_cost=cost_left(key).window,
        )
        for key in keys
    ]


def _remaining(budget: int | None, used: int) -> int | None:
    return None if budget is None else max(0, budget - used)


def _left(remaining: float | None, budget: float | None, suffix: str = "") -> str:
    """`120 of 1,000 in 24 h`; empty without a budget."""
    return "" if remaining is None or budget is None else f"{remaining:,} of {budget:,}{suffix}"
