"""The checks of `cortex doctor` on the gateway's configuration and on what it names."""

from __future__ import annotations

import asyncio
import functools
import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from cortex.cli.commands.doctor.checks import Finding, NodeEndpoint, Severity
from cortex.cli.service_environment import use_environment_file
from cortex.cli.up.plan import reachable
from cortex.gateway.config import Config, GatewaySection, NeuronSection, load
from cortex.gateway.configuration_files import catalogue_path, load_catalogue, unknown_nodes
from cortex.gateway.database import StoreError, driver_of, is_url
from cortex.gateway.dispatch.nodes.dns_discovery import resolve_addresses, with_discovered
from cortex.gateway.listening import certificate_of
from cortex.http.tls import own_context
from cortex.settings import Listen, SettingsError
from cortex.telemetry.tracing import open_tracer
from cortex.wire.words import plural


def environment(path: Path | None) -> Iterator[Finding]:
    """The environment file of the service, whose variables the other checks use."""
    try:
        if (file := use_environment_file(path)) is not None:
            yield Finding("config", Severity.FINE, f"{file}: variables of the service")
    except PermissionError as error:
        what = f"{error.filename} cannot be read, so the variables of the service are unknown"
        yield Finding("config", Severity.NOTE, what, "run this command as root")


def config(path: Path | None) -> Iterator[Finding]:
    """The gateway's file and the catalogue in the same folder."""
    if path is None:
        yield Finding("config", Severity.FINE, "no file given: defaults and CORTEX_… variables apply")
    try:
        settings = load(path, os.environ)
        if path is not None:
            yield Finding("config", Severity.FINE, f"{path}: {plural(len(settings.neurons), 'node')}")
        if (catalogue := catalogue_path(settings, path)).exists():
            models = load_catalogue(settings, path).models
            yield Finding("config", Severity.FINE, f"{catalogue}: {plural(len(models), 'model')}")
        certificate_of(settings, path.parent if path is not None else Path.cwd())
        open_tracer(settings.telemetry, "cortex").close()
    except SettingsError as error:
        yield Finding("config", Severity.PROBLEM, error.message, "fix the configuration")


def _settings(path: Path | None) -> Config | None:
    """None if they cannot be read, which `config` reports."""
    try:
        return load(path, os.environ)
    except SettingsError:
        return None


def discovery(path: Path | None) -> Iterator[Finding]:
    """The nodes that are found by DNS."""
    if (settings := _settings(path)) is None:
        return
    if (name := settings.discovery.dns) is None:
        return
    found, problem = _resolved(name)
    if found:
        yield Finding("config", Severity.FINE, f"{name} resolves to {', '.join(found)}")
    else:
        remedy = "correct discovery.dns, or start the nodes of that name"
        yield Finding("config", Severity.PROBLEM, f"{name} resolves to no node ({problem or 'no addresses'})", remedy)


@functools.cache
def _resolved(name: str) -> tuple[tuple[str, ...], str]:
    """The addresses of `name`, and what went wrong. Cached, because a resolver that does not respond takes long."""
    try:
        return tuple(sorted(asyncio.run(resolve_addresses(name)))), ""
    except OSError as error:
        return (), error.strerror or str(error)


def _nodes(settings: Config) -> tuple[NeuronSection, ...]:
    """The nodes of the file and those that are found by DNS."""
    section = settings.discovery
    found = () if section.dns is None else _resolved(section.dns)[0]
    return with_discovered(settings.neurons, found, section.port)


def references(path: Path | None) -> Iterator[Finding]:
    """Names and addresses in the configuration that must be consistent."""
    if (settings := _settings(path)) is None:
        return
    try:
        catalogue = load_catalogue(settings, path)
    except SettingsError:
        return  # reported by `config`
    names = {section.name for section in _nodes(settings)}
    for spec in catalogue.models:
        for key, name in unknown_nodes(spec, names):
            what = f"{key} of {spec.id} names {name}, and there is no such node"
            yield Finding("config", Severity.PROBLEM, what, f"correct `{key}`, or add the node under [[neurons]]")
    for alias, model in catalogue.alias_targets.items():
        if model in catalogue.aliases:
            what = f"alias {alias} points to {model}, which is itself an alias"
            yield Finding("config", Severity.PROBLEM, what, "aliases are not chained: name the model")
        elif not catalogue.has(model):
            what = f"alias {alias} points to {model}, which is not in the catalogue"
            yield Finding("config", Severity.NOTE, what, "it works only while a node lists the model; check its name")
    yield from _shared_addresses(settings)


def _shared_addresses(settings: Config) -> Iterator[Finding]:
    """Addresses that are used twice, by the gateway or by nodes."""
    own = {"gateway.listen": settings.gateway.listen, "gateway.metrics_listen": settings.gateway.metrics_listen}
    users: dict[str, list[str]] = {}
    for name, listen in own.items():
        if listen is not None and listen.port:
            users.setdefault(str(_reachable_address(listen)), []).append(name)
    for section in settings.neurons:
        parts = urlsplit(section.endpoint)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname or ""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        users.setdefault(f"{address}{parts.path.rstrip('/')}", []).append(f"node {section.name}")
    for address, sharing in users.items():
        if len(sharing) > 1:
            what = f"{address} is the address of {' and '.join(sharing)}"
            yield Finding("config", Severity.PROBLEM, what, "give each an address of its own")


def database(path: Path | None) -> Iterator[Finding]:
    """Whether the PostgreSQL databases of the configuration can be reached. Changes nothing there."""
    if (settings := _settings(path)) is None:
        return
    directory = path.parent if path is not None else Path.cwd()
    urls = {settings.database(directory), settings.responses_database(directory)}
    for url in sorted(url for url in urls if is_url(url)):
        try:
            driver = driver_of(url)
        except StoreError as error:
            what, _, remedy = str(error).rpartition(": ")
            yield Finding("database", Severity.PROBLEM, what, remedy)
            continue
        try:
            driver.connect().close()
            yield Finding("database", Severity.FINE, f"{driver.name} responds")
        except driver.errors as error:
            what = f"{driver.name} cannot be used: {' '.join(str(error).split())}"
            yield Finding("database", Severity.PROBLEM, what, "start it, or correct its URL, user and password")


def nodes(path: Path | None) -> Iterator[Finding]:
    """Every node of the configuration: reachable, of the same version, with usable devices."""
    if (settings := _settings(path)) is None:
        return
    directory = path.parent if path else Path.cwd()
    for section in _nodes(settings):
        ca_file = settings.ca_file(section, directory)
        other = NodeEndpoint(
            "nodes", section.name, section.endpoint, settings.key_variable(section), ca_file, section.kind
        )
        yield from other.check("the gateway")


def addresses(path: Path | None) -> tuple[Listen, ...]:
    """Addresses of gateway, metrics and neuron on this machine, in this order, as reachable from here."""
    gateway = GatewaySection(listen=Listen("127.0.0.1:31313"), metrics_listen=Listen("127.0.0.1:31314"))
    if path is not None and (settings := _settings(path)) is not None:
        gateway = settings.gateway
    found = (gateway.listen, gateway.metrics_listen, Listen("127.0.0.1:13131"))
    return tuple(_reachable_address(listen) for listen in found if listen is not None)


def own_certificate(path: Path) -> ssl.SSLContext | None:
    """Accepts the certificate of the gateway that `path` configures; None for one without."""
    try:
        section = load(path, os.environ).gateway
        return own_context(path.parent / section.tls_cert.expanduser()) if section.tls_cert is not None else None
    except SettingsError:
        return None  # reported by `config`


def _reachable_address(listen: Listen) -> Listen:
    host = reachable(listen.host)
    return Listen(f"[{host}]:{listen.port}" if ":" in host else f"{host}:{listen.port}")
