"""`cortex keys`: add, list, change, remove, export and import the API keys of clients.

With `--config` a command edits the keys in that file, which are managed as code. Without it, it asks the gateway, whose
keys are in its database.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
import msgspec

from cortex import settings
from cortex.cli.client import GatewayClient, gateway_options
from cortex.cli.failures import CommandError, ExitCode, Group, check_environment
from cortex.cli.ledger_source import ask, configuration, ledger
from cortex.cli.model_name import MODEL
from cortex.cli.output import answer, console, json_option, print_json, table
from cortex.gateway.config import Config, load
from cortex.gateway.database import Execute
from cortex.gateway.dispatch.operator import audit
from cortex.gateway.ledger import key_store
from cortex.gateway.ledger.groups import Counters, GroupSection, budget_left, cost_id, group_id
from cortex.gateway.ledger.key_file import AmbiguousKey, KeyFile, KeyFileError, NameTaken, UnknownKey
from cortex.gateway.ledger.key_store import KeyConflict, KeysInForce, StoredKeys, merged
from cortex.gateway.ledger.keys import KeySection, as_toml, generate, tenant_name
from cortex.gateway.ledger.limits import MINUTE_S
from cortex.gateway.ledger.store import read_counters
from cortex.system import private_file
from cortex.wire.fields.request_class import CLASSES
from cortex.wire.words import duration, os_error_in_words, plural

_REMOVABLE = (
    *("model", "request-class", "highest-class", "requests-per-min", "window-tokens", "balance-tokens"),
    *("window-cost", "balance-cost", "group", "expires"),
)
_GROUP_REMOVABLE = tuple(name for name in _REMOVABLE if name not in ("group", "expires"))


@click.group(cls=Group)
def keys() -> None:
    """Manage the API keys of clients."""


def _limit_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The limits that keys and groups have, passed on as `models` and `limits`."""
    for option in reversed(
        (
            click.option(
                "--model",
                "models",
                type=MODEL,
                multiple=True,
                help="A model to allow, or a pattern with *; repeatable.",
            ),
            click.option(
                "--class", "request_class", type=click.Choice(CLASSES), help="Class of requests that name none."
            ),
            click.option(
                "--highest-class", type=click.Choice(CLASSES), help="Highest class that its requests may have."
            ),
            click.option("--requests-per-min", type=click.IntRange(1), help="Limit of requests per minute."),
            click.option("--window-tokens", type=click.IntRange(0), help="Limit of tokens within the window."),
            click.option("--window-s", type=click.IntRange(60), help="Length of the window; one day by default."),
            click.option("--balance-tokens", type=click.IntRange(0), help="Limit of tokens for its lifetime."),
            click.option(
                "--window-cost",
                type=click.FloatRange(0),
                help="Limit of cost within the window, at the prices of models.toml.",
            ),
            click.option("--balance-cost", type=click.FloatRange(0), help="Limit of cost for its lifetime."),
        )
    ):
        function = option(function)
    return function


def _config_option(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(
        "-c", "--config", type=click.Path(path_type=Path), help=f"{what} this cortex.toml, not at the gateway."
    )


def _given(models: tuple[str, ...], limits: Mapping[str, Any], without: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields that the user named."""
    given = {name: value for name, value in limits.items() if value is not None}
    if models:
        given["models"] = models
    for name in without:
        given |= {"models": ()} if name == "model" else {name.replace("-", "_"): None}
    return given


@keys.command()
@click.argument("name")
@_limit_options
@click.option("--group", help="The group whose limits it shares.")
@click.option("--expires", help="When it stops working: a date or time such as 2026-12-31.")
@click.option("--operator", is_flag=True, help="Also allow it to load, unload and pin models, and to manage keys.")
@_config_option("Add it to")
@click.option("--print", "is_printed", is_flag=True, help="Only print the key, as a table for cortex.toml.")
@click.option("--replace", is_flag=True, help="Replace NAME's key and its limits in the file.")
@gateway_options
@json_option
def add(
    name: str,
    models: tuple[str, ...],
    operator: bool,
    config: Path | None,
    is_printed: bool,
    replace: bool,
    gateway: GatewayClient,
    as_json: bool,
    **limits: Any,
) -> None:
    """Create a key for NAME and show it, once.

    The gateway stores it in its database; it needs the key of an operator. With --config it is added to the file, as
    the first key must be. Only its hash is stored.
    """
    if not name.strip():
        raise CommandError("a key needs a name", "name its owner: cortex keys add anna", ExitCode.USAGE)
    if replace and config is None:
        raise click.UsageError("--replace needs --config")
    given = _given(models, limits) | ({"operator": True} if operator else {})
    if config is None:
        check_environment()
    try:
        new = generate(name, **given)
    except ValueError as problem:
        raise click.BadParameter(str(problem), param_hint="--expires") from problem
    if config is None and not is_printed:
        made = gateway.post("/keys", {"name": name, **given})  # which generates another one
        _show_new(made["key"], "It is in the gateway's database.", made, as_json=as_json)
        return
    if config is not None:
        with _file_errors():
            KeyFile(config).add(new.section, replace=replace)
    where = f"Added to {config}." if config is not None else f"Put this into cortex.toml:\n\n{as_toml(new.section)}"
    _show_new(new.text, where, {"key": new.text, **msgspec.to_builtins(new.section)}, as_json=as_json)


def _show_new(key: str, where: str, described: Any, *, as_json: bool) -> None:
    if as_json:
        print_json(described)
        return
    console().print(f"{key}\n", soft_wrap=True)
    console().print(f"This is the only time the whole key is shown. {where}", soft_wrap=True)


@keys.command()
@click.argument("key", metavar="NAME_OR_ID")
@_limit_options
@click.option("--group", help="The group whose limits it shares.")
@click.option("--expires", help="When it stops working: a date or time such as 2026-12-31.")
@click.option("--without", multiple=True, type=click.Choice(_REMOVABLE), help="Remove this limit; repeat for more.")
@_config_option("Change it in")
@gateway_options
@json_option
def change(
    key: str,
    models: tuple[str, ...],
    without: tuple[str, ...],
    config: Path | None,
    gateway: GatewayClient,
    as_json: bool,
    **limits: Any,
) -> None:
    """Change the limits or the expiry of a key.

    The change applies at once at this gateway, and within a second at others. What the key has spent stays counted.
    """
    changes = _given(models, limits, without)
    if not changes:
        raise CommandError("nothing to change", "give a limit, see `cortex keys change -h`", ExitCode.USAGE)
    if config is None:
        check_environment()
        described = gateway.patch(f"/keys/{quote(key, safe='')}", changes)
    else:
        try:
            with _file_errors():
                described = KeyFile(config).change(key, lambda before: msgspec.structs.replace(before, **changes))
        except ValueError as problem:
            raise click.BadParameter(str(problem), param_hint="--expires") from problem
        described = msgspec.to_builtins(described)
    answer(described, f"Changed {described['name']} ({described['id']}).", as_json=as_json)


@keys.command()
@click.argument("key", metavar="NAME_OR_ID")
@_config_option("Remove it from")
@gateway_options
@json_option
def remove(key: str, config: Path | None, gateway: GatewayClient, as_json: bool) -> None:
    """Revoke a key.

    This gateway rejects it at once, and others within a second. Its usage stays in the ledger.
    """
    is_one_left = True
    if config is None:
        check_environment()
        removed = gateway.delete(f"/keys/{quote(key, safe='')}")["revoked"]
    else:
        with _file_errors():
            section, is_one_left = KeyFile(config).remove(key)
        removed = {"name": section.name, "id": section.id}
    if as_json:
        print_json({"removed": removed})
        return
    console().print(f"Removed {removed['name']} ({removed['id']}).", soft_wrap=True)
    if not is_one_left:
        console().print(f"No key is left in {config}: without keys in its database, a gateway rejects every request.")


@contextlib.contextmanager
def _file_errors() -> Any:
    codes = {UnknownKey: ExitCode.NOT_FOUND, AmbiguousKey: ExitCode.USAGE, NameTaken: ExitCode.USAGE}
    try:
        yield
    except KeyFileError as problem:
        code = codes.get(type(problem), ExitCode.FAILED)
        raise CommandError(problem.message, problem.remedy, code) from problem


class LimitsRow(msgspec.Struct, frozen=True, kw_only=True):
    """Limits, and what is left of them. Unknown fields of a gateway are ignored."""

    name: str
    models: tuple[str, ...] = ()
    request_class: str | None = None
    highest_class: str | None = None
    requests_per_min: int | None = None
    window_tokens: int | None = None
    window_s: int = 86400
    balance_tokens: int | None = None
    window_cost: float | None = None
    balance_cost: float | None = None
    spent_tokens: int = 0
    window_spent_tokens: int = 0
    balance_left_tokens: int | None = None
    window_left_tokens: int | None = None
    balance_left_cost: float | None = None
    window_left_cost: float | None = None
    source: str = "file"
    tenant: str = ""
    """For `cortex forget --tenant`, once the key is revoked."""

    def cells(self) -> tuple[str, ...]:
        """Under `_LIMIT_COLUMNS`."""
        window = f" in {duration(self.window_s)}"
        costs = (
            _left(self.window_left_cost, self.window_cost, window),
            _left(self.balance_left_cost, self.balance_cost),
        )
        bounded = f" up to {self.highest_class}" if self.highest_class else ""
        return (
            f"{self.request_class or ''}{bounded}".strip(),
            str(self.requests_per_min or ""),
            _left(self.window_left_tokens, self.window_tokens, window),
            _left(self.balance_left_tokens, self.balance_tokens),
            "; ".join(filter(None, costs)),
            self.source,
        )


_LIMIT_COLUMNS = ("CLASS", ">REQUESTS/MIN", ">WINDOW LEFT", ">BALANCE LEFT", ">COST LEFT", "IN")


class KeyRow(LimitsRow, frozen=True, kw_only=True):
    """A key without its hash."""

    id: str
    operator: bool = False
    expires: str | None = None
    is_expired: bool = False
    group: str | None = None


class GroupRow(LimitsRow, frozen=True, kw_only=True):
    """A group and the names of its keys."""

    keys: tuple[str, ...] = ()


@keys.command("list")
@click.option("-c", "--config", type=click.Path(path_type=Path), help="Read the keys of this cortex.toml.")
@gateway_options
@json_option
def list_keys(config: Path | None, gateway: GatewayClient, as_json: bool) -> None:
    """List the keys and groups with their remaining budgets.

    With --config, or a cortex.toml in the working directory, the file and its database are read directly, and the
    gateway may be running. Otherwise the gateway lists them: all for an operator's key, only itself for any other key.
    """
    rows, groups = _listed(config, gateway)
    if as_json:
        print_json(rows)
        return
    if not rows:
        console().print(
            "no keys: a gateway that never had a key admits only its own host, and one that had keys admits nobody, "
            "unless gateway.open is true; add a key with `cortex keys add NAME`"
        )
    else:
        shown = table("NAME", "ID", "GROUP", "MODELS", "OPERATOR", "EXPIRES", *_LIMIT_COLUMNS)
        for key in rows:
            shown.add_row(
                key.name,
                key.id,
                key.group or "",
                ", ".join(key.models) or ("all" if key.group is None else "of its group"),
                "yes" if key.operator else "",
                f"{key.expires} (expired)" if key.is_expired else key.expires or "",
                *key.cells(),
            )
        console().print(shown)
    if groups:
        _show_groups(groups)


@keys.command("groups")
@click.option("-c", "--config", type=click.Path(path_type=Path), help="Read the groups of this cortex.toml.")
@gateway_options
@json_option
def list_groups(config: Path | None, gateway: GatewayClient, as_json: bool) -> None:
    """List the groups with the remaining budgets that their keys share."""
    _, groups = _listed(config, gateway)
    if as_json:
        print_json(groups)
    elif groups:
        _show_groups(groups)
    else:
        console().print("no groups: make one with `cortex keys set-group NAME`, or under [[groups]] in cortex.toml")


@keys.command("set-group")
@click.argument("name")
@_limit_options
@click.option(
    "--without", multiple=True, type=click.Choice(_GROUP_REMOVABLE), help="Remove this limit; repeat for more."
)
@gateway_options
@json_option
def set_group(
    name: str,
    models: tuple[str, ...],
    without: tuple[str, ...],
    gateway: GatewayClient,
    as_json: bool,
    **limits: Any,
) -> None:
    """Make a group at the gateway, or change its limits, which all its keys share."""
    check_environment()
    given = _given(models, limits, without)
    known = {group["name"] for group in gateway.get("/groups")["groups"]}
    if name in known:
        described = gateway.patch(f"/groups/{quote(name, safe='')}", given)
    else:
        described = gateway.post("/groups", {"name": name, **given})
    if as_json:
        print_json(described)
    else:
        _show_groups([msgspec.convert(described, GroupRow)])


@keys.command("remove-group")
@click.argument("name")
@gateway_options
def remove_group(name: str, gateway: GatewayClient) -> None:
    """Remove a group without keys from the gateway."""
    check_environment()
    gateway.delete(f"/groups/{quote(name, safe='')}")
    console().print(f"Removed the group {name}.", soft_wrap=True)


@keys.command("export")
@click.option("-c", "--config", type=click.Path(path_type=Path), help="The cortex.toml whose database is read.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write a file that only its owner can read.")
def export_keys(config: Path | None, output: Path | None) -> None:
    """Write the keys and groups of the database as tables of a cortex.toml, for a backup or another database.

    The tables have the hashes of keys, not the keys. Keys in the configuration file are not exported.
    """
    path = _database_config(config)
    loaded = load(path, os.environ)
    stored = _read(loaded, path)[0]
    tables = [as_toml(group, "groups") for group in stored.groups] + [as_toml(key) for key in stored.keys]
    text = "\n".join(tables)
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        private_file.write(output, text.encode())
    except OSError as problem:
        raise CommandError(f"cannot write {output}: {os_error_in_words(problem)}", "name another file") from problem
    console().print(f"{_counted(stored)} in {output}", soft_wrap=True)


@keys.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("-c", "--config", type=click.Path(path_type=Path), help="The cortex.toml whose database is written.")
@click.option("--move", is_flag=True, help="Then remove them from FILE, which takes precedence over the database.")
def import_keys(file: Path, config: Path | None, move: bool) -> None:
    """Write the [[keys]] and [[groups]] of FILE into the database.

    FILE is an export, or a cortex.toml: `cortex keys import cortex.toml --move -c cortex.toml` moves its keys into its
    database. All gateways on the database accept them within a second. They replace keys with the same id and groups
    with the same name.
    """
    path = _database_config(config)
    loaded, source = load(path, os.environ), settings.load(Config, file, env_prefix="CORTEX_", env={})
    other_groups = [group.name for group in loaded.groups]
    imported = StoredKeys(source.keys, source.groups)
    with ledger(loaded.database(path.parent)) as database:
        database.use(key_store.SCHEMA).use(audit.SCHEMA)

        def write(execute: Execute) -> None:
            key_store.import_keys(execute, source.keys, source.groups, other_groups)
            if loaded.ledger.audit_days:
                names = ", ".join([*(key.name for key in source.keys), *(group.name for group in source.groups)])
                audit.add_command(execute, "cortex keys import", f"{_counted(imported)}: {names}")

        try:
            database.run(lambda execute: key_store.edit(execute, lambda _: write(execute)))
        except KeyConflict as problem:
            raise CommandError(f"nothing was imported: {problem}", "correct the file") from problem
    if move:
        with _file_errors():
            KeyFile(file).remove_all(imported.keys, imported.groups)
    console().print(f"{'Moved' if move else 'Imported'} {_counted(imported)}.", soft_wrap=True)
    ignored = merged(load(path, os.environ).keys, (), imported).ignored
    if ignored:
        console().print(
            f"{path} has {plural(len(ignored), 'key')} of them too, which take precedence: remove them there."
        )


def _counted(stored: StoredKeys) -> str:
    return f"{plural(len(stored.keys), 'key')} and {plural(len(stored.groups), 'group')}"


def _database_config(config: Path | None) -> Path:
    path = configuration(config)
    if path is None:
        raise CommandError("a cortex.toml must name the database", "name it with --config", ExitCode.USAGE)
    return path


def _listed(config: Path | None, gateway: GatewayClient) -> tuple[list[KeyRow], list[GroupRow]]:
    path = configuration(config)
    if path is None:
        listed = ask(gateway, "/keys")
        return msgspec.convert((listed["keys"], listed.get("groups", [])), tuple[list[KeyRow], list[GroupRow]])
    loaded, now, none = load(path, os.environ), time.time(), Counters()
    stored, counters = _read(loaded, path)
    in_force = merged(loaded.keys, loaded.groups, stored)

    def row(owner: KeySection | GroupSection, id: str, *, is_file: bool) -> dict[str, Any]:
        left = budget_left(owner, counters.get(id, none), counters.get(cost_id(owner), none))
        tenant = tenant_name(owner if isinstance(owner, KeySection) else owner.name)
        return {**msgspec.to_builtins(owner), **left, "source": "file" if is_file else "database", "tenant": tenant}

    rows = [
        {**row(key, key.id, is_file=key.id in in_force.file_ids), "is_expired": now >= key.expires_at}
        for key in in_force.keys
    ]
    groups = [
        {
            **row(group, group_id(group.name), is_file=group.name in in_force.file_groups),
            "keys": [key.name for key in in_force.keys if key.group == group.name],
        }
        for group in in_force.groups
    ]
    return msgspec.convert((rows, groups), tuple[list[KeyRow], list[GroupRow]])


def _read(config: Config, path: Path) -> tuple[StoredKeys, Mapping[str, Counters]]:
    """The keys of the database and what all keys have spent; nothing where there is no database yet."""
    location = config.database(path.parent)
    if "://" not in location and not Path(location).exists():
        return StoredKeys(), {}
    with ledger(location) as database:
        database.use(key_store.SCHEMA)
        stored = database.run(key_store.read_keys)
        windows = _windows(merged(config.keys, config.groups, stored), time.time())
        return stored, database.run(lambda execute: read_counters(execute, windows))


def _windows(in_force: KeysInForce, now: float) -> dict[str, int]:
    """The first minute of the window of each account of a key or group."""
    windows: dict[str, int] = {}
    for owner in in_force.owners:
        first = int((now - owner.window_s) // MINUTE_S)
        own = owner.id if isinstance(owner, KeySection) else group_id(owner.name)
        windows |= {own: first, cost_id(owner): first}
    return windows


def _show_groups(groups: list[GroupRow]) -> None:
    shown = table("GROUP", "KEYS", "MODELS", ">SPENT", *_LIMIT_COLUMNS)
    for group in groups:
        names = ", ".join(group.keys[:5]) + (" …" if len(group.keys) > 5 else "")
        shown.add_row(group.name, names, ", ".join(group.models) or "all", f"{group.spent_tokens:,}", *group.cells())
    console().print(shown)


def _left(remaining: float | None, budget: float | None, suffix: str = "") -> str:
    """`120 of 1,000 in 24 h`; empty without a budget."""
    return "" if remaining is None or budget is None else f"{remaining:,} of {budget:,}{suffix}"
