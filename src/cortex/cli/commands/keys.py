"""`cortex keys`: add, list and remove the API keys of clients."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

import click
import msgspec

from cortex import settings
from cortex.cli.failures import CommandError, ExitCode, Group
from cortex.cli.output import console, json_option, print_json, table
from cortex.gateway.config import Config, load
from cortex.gateway.ledger.keys import KeySection, as_toml, generate

_TABLE = re.compile(r"\s*\[")
_KEYS_TABLE = re.compile(r"\s*\[\[\s*keys\s*\]\]")


@click.group(cls=Group)
def keys() -> None:
    """Add, list and remove the API keys of clients."""


@keys.command()
@click.argument("name")
@click.option("--model", "models", multiple=True, help="A model it may use, or a pattern with *; repeat for more.")
@click.option("--requests-per-min", type=click.IntRange(1), help="Limit of requests per minute.")
@click.option("--window-tokens", type=click.IntRange(0), help="Limit of tokens within the window.")
@click.option("--window-s", type=click.IntRange(60), default=86400, show_default=True, help="Length of the window.")
@click.option("--balance-tokens", type=click.IntRange(0), help="Limit of tokens for the lifetime of the key.")
@click.option("--operator", is_flag=True, help="Also allow it to load, unload and pin models.")
@click.option("--config", type=click.Path(path_type=Path), help="Add it to this cortex.toml; printed when absent.")
@json_option
def add(
    name: str,
    models: tuple[str, ...],
    requests_per_min: int | None,
    window_tokens: int | None,
    window_s: int,
    balance_tokens: int | None,
    operator: bool,
    config: Path | None,
    as_json: bool,
) -> None:
    """Create a key for NAME and show it, once.

    Only its hash is stored. A running gateway accepts it as soon as the file has changed.
    """
    if not name.strip():
        raise CommandError("a key needs a name", "name its owner: cortex keys add anna", ExitCode.USAGE)
    made = generate(
        name,
        models=models,
        requests_per_min=requests_per_min,
        window_tokens=window_tokens,
        window_s=window_s,
        balance_tokens=balance_tokens,
        operator=operator,
    )
    if config is not None:
        append(config, made.section)
    if as_json:
        print_json({"key": made.text, **msgspec.to_builtins(made.section)})
        return
    out = console()
    out.print(f"{made.text}\n", markup=False, soft_wrap=True)
    if config is not None:
        out.print(f"Added to {config}. This is the only time the whole key is shown.", markup=False, soft_wrap=True)
    else:
        out.print("This is the only time the whole key is shown. Put this into cortex.toml:\n")
        out.print(as_toml(made.section), markup=False, soft_wrap=True)


def append(config: Path, section: KeySection) -> None:
    """Append the key to the file, which must be valid before and after."""
    load(config, os.environ)
    text = f"{config.read_text(encoding='utf-8').rstrip()}\n\n{as_toml(section)}"
    settings.loads(Config, text, file=config)
    replace(config, text)


def replace(config: Path, text: str) -> None:
    """Replace the contents of the file atomically; its mode stays."""
    mode = config.stat().st_mode
    fresh = config.with_name(f".{config.name}.new")
    fresh.write_text(text, encoding="utf-8")
    fresh.chmod(mode)
    fresh.replace(config)


@keys.command()
@click.argument("key", metavar="NAME_OR_ID")
@click.option("--config", type=click.Path(path_type=Path), required=True, help="The cortex.toml to remove it from.")
@json_option
def remove(key: str, config: Path, as_json: bool) -> None:
    """Remove a key.

    A running gateway rejects it as soon as the file has changed. Its usage stays in the ledger.
    """
    before = settings.load(Config, config, env_prefix="CORTEX_", env={})
    found = [section for section in before.keys if key in (section.id, section.name)]
    if not found:
        raise CommandError(f"{config} has no key {key}", "see `cortex keys list`", ExitCode.NOT_FOUND)
    if len(found) > 1:
        ids = ", ".join(section.id for section in found)
        raise CommandError(f"{len(found)} keys are called {key}", f"name one by its id: {ids}", ExitCode.USAGE)
    (section,) = found
    text = without_table(config.read_text(encoding="utf-8"), section)
    left = tuple(other for other in before.keys if other is not section)
    if text is None or settings.loads(Config, text, file=config) != msgspec.structs.replace(before, keys=left):
        raise CommandError(f"this command cannot edit the table of {key} in {config}", "delete it by hand")
    replace(config, text)
    if as_json:
        print_json({"removed": {"name": section.name, "id": section.id}})
        return
    console().print(f"Removed {section.name} ({section.id}) from {config}.", markup=False, soft_wrap=True)
    if not left:
        console().print("No key is left: everybody who can reach the gateway can use it.")


def without_table(text: str, section: KeySection) -> str | None:
    """The text without the `[[keys]]` table of `section`; comments and blank lines after it stay. None: not found."""
    lines = text.splitlines(keepends=True)
    starts = [number for number, line in enumerate(lines) if _TABLE.match(line)]
    for start, end in itertools.pairwise([*starts, len(lines)]):
        while lines[end - 1].strip() == "" or lines[end - 1].lstrip().startswith("#"):
            end -= 1
        if _KEYS_TABLE.match(lines[start]) and any(_id_line(section.id).match(line) for line in lines[start:end]):
            return "".join([*lines[:start], *lines[end:]])
    return None


def _id_line(key_id: str) -> re.Pattern[str]:
    return re.compile(rf"""\s*id\s*=\s*["']{re.escape(key_id)}["']""")


@keys.command("list")
@click.option("--config", type=click.Path(path_type=Path), required=True, help="The cortex.toml to read.")
@json_option
def list_keys(config: Path, as_json: bool) -> None:
    """List the keys of a configuration."""
    found = load(config, os.environ).keys
    if as_json:
        print_json(found)
        return
    if not found:
        console().print(
            "no keys: a gateway that never had keys admits everybody, another one nobody unless gateway.open is true; "
            "add a key with `cortex keys add NAME`"
        )
        return
    rows = table("NAME", "ID", "MODELS", "OPERATOR", ">REQUESTS/MIN", ">TOKENS/WINDOW", ">BALANCE")
    for key in found:
        window = f"{key.window_tokens:,} in {key.window_s:,} s" if key.window_tokens is not None else ""
        rows.add_row(
            key.name,
            key.id,
            ", ".join(key.models) or "all",
            "yes" if key.operator else "",
            str(key.requests_per_min or ""),
            window,
            f"{key.balance_tokens:,}" if key.balance_tokens is not None else "",
        )
    console().print(rows)
