"""`cortex doctor`: checks for common problems and suggests fixes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from cortex.cli.client import DEFAULT_URL, GatewayClient, gateway_options
from cortex.cli.commands.doctor import checks, configuration_checks
from cortex.cli.commands.doctor.checks import Finding, Severity
from cortex.cli.commands.doctor.device_checks import devices
from cortex.cli.failures import Command, ExitCode
from cortex.cli.output import console, json_option, print_json
from cortex.wire.words import plural

_MARKS = {Severity.FINE: ("✓", "green"), Severity.NOTE: ("!", "yellow"), Severity.PROBLEM: ("✗", "bold red")}


@click.command(cls=Command)
@click.option("-c", "--config", type=click.Path(path_type=Path), help="The cortex.toml to check.")
@gateway_options
@json_option
def doctor(config: Path | None, gateway: GatewayClient, as_json: bool) -> int:
    """Check for common problems and suggest fixes.

    Checks versions, libraries, configuration, databases, gateway, models, nodes, devices, ports, disk and cache. Exits
    with code 1 if it finds a problem. With --config, the gateway is expected at the address in that file, unless --url
    is given. Also reads the environment file of the systemd unit in the same folder: cortex.env for cortex.toml.
    """
    environment = list(configuration_checks.environment(config))
    listens = configuration_checks.addresses(config)
    expected = config if gateway.url == DEFAULT_URL else None
    if expected is not None:
        tls = configuration_checks.own_certificate(expected)
        gateway = gateway.at(f"{'http' if tls is None else 'https'}://{listens[0]}", tls)
    findings = [
        *checks.versions(),
        *checks.engine(),
        *checks.libraries(),
        *environment,
        *configuration_checks.config(config),
        *configuration_checks.discovery(config),
        *configuration_checks.references(config),
        *configuration_checks.database(config),
        *checks.gateway(gateway, expected),
        *checks.models(gateway),
        *configuration_checks.nodes(config),
        *devices(),
        *checks.ports(listens),
        *checks.disk(),
        *checks.cache(),
    ]
    return report(findings, as_json)


def report(findings: Iterable[Finding], as_json: bool) -> int:
    """Print the findings; return the exit code, FAILED if there is a problem."""
    listed = list(findings)
    if as_json:
        print_json([asdict(finding) for finding in listed])
    else:
        show(listed, console())
    return ExitCode.FAILED if any(finding.verdict is Severity.PROBLEM for finding in listed) else ExitCode.OK


def show(findings: list[Finding], out: Console) -> None:
    topic = ""
    for finding in findings:
        mark, style = _MARKS[finding.verdict]
        label = finding.topic if finding.topic != topic else ""
        topic = finding.topic
        out.print(Text.assemble((f"{label:<10}", "bold"), (f"{mark} ", style), finding.what), soft_wrap=True)
        if finding.remedy:
            out.print(Text.assemble(" " * 12, ("→ ", style), finding.remedy), soft_wrap=True)
    verdicts = [finding.verdict for finding in findings]
    problems, notes = verdicts.count(Severity.PROBLEM), verdicts.count(Severity.NOTE)
    summary = f"{plural(problems, 'problem')} to fix" if problems else "no problems found"
    out.print(f"\n{summary}, {plural(notes, 'note')}" if notes else f"\n{summary}", style="bold")
