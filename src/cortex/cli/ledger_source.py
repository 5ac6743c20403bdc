"""The source of keys and usage for commands: a configuration and its database on this machine, or a gateway."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from cortex.cli.client import GatewayClient, GatewayUnreachable
from cortex.cli.failures import CommandError, check_environment
from cortex.cli.output import file_here
from cortex.cli.service_environment import use_environment_file
from cortex.gateway.database import Database, StoreError
from cortex.gateway.ledger.store import open_store


def configuration(named: Path | None) -> Path | None:
    """The configuration to read: the one that `--config` names, or the one in the working directory unless the user
    named a gateway. None: ask the gateway. Raises SettingsError for variables that no command knows."""
    if named is not None:
        with contextlib.suppress(PermissionError):
            use_environment_file(named)
        return named
    source = click.get_current_context().get_parameter_source("url")
    found = file_here("cortex.toml") if source is ParameterSource.DEFAULT else None
    if found is None:
        check_environment()
    return found


def ask(gateway: GatewayClient, path: str) -> Any:
    """The gateway's response. Raises CommandError."""
    try:
        return gateway.get(path)
    except GatewayUnreachable as error:
        remedy = "name the gateway with --url or CORTEX_URL, or its configuration with --config"
        raise GatewayUnreachable(gateway.url, error.reason, remedy) from error


@contextlib.contextmanager
def ledger(location: str) -> Iterator[Database]:
    """The database at a file path or `postgresql://` URL. Raises CommandError where it cannot be read."""
    try:
        database = open_store(location)
        try:
            yield database
        finally:
            database.close_connection()
    except StoreError as error:
        raise CommandError(
            str(error), "check `gateway.state` and `ledger.database` in cortex.toml", error.exit_code
        ) from error
