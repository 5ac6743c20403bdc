"""The files of a gateway's configuration: `cortex.toml`, and the catalogue in the same folder."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cortex import settings
from cortex.fleet.catalogue import Catalogue, ModelSpec, near_misses
from cortex.gateway import config as configuration
from cortex.gateway.config import Config, GatewaySection
from cortex.gateway.created_models import CreatedModels, joined, without_entries
from cortex.settings import SettingsError, Stamp, stamp
from cortex.settings.conversion import Source
from cortex.settings.positions import positions

log = logging.getLogger(__name__)


def warn_about_access(config: Config, *, is_open: bool, has_keys: bool) -> None:
    """Warn when everybody may use the gateway, or nobody. `is_open`: it admits requests without a key."""
    section = config.gateway
    if not is_open:
        if not has_keys and not config.sign_in.is_enabled:
            log.warning(
                "every request is rejected: this gateway had keys and has none now. "
                "Add one with `cortex keys add`, or set gateway.open = true to admit everybody"
            )
        elif section.open:
            log.warning("gateway.open has no effect while there are keys: remove the setting, or the keys")
        return
    reason = "gateway.open is true" if section.open else "it has no keys yet, and gateway.open_until_keys is true"
    for address in config.public_addresses:
        log.warning("anybody who can reach %s may use this gateway: %s", address, reason)


def warn_about_restart(before: Config, after: Config) -> None:
    """Name the changed keys that a reload does not apply."""
    addresses = ("listen", "metrics_listen", "ollama_listen", "open_listing", "tls_cert", "tls_key", "cors_origins")
    for key in (*addresses, "state", "max_body_mb", "connect_timeout_s", "poll_interval_s", "poll_timeout_s"):
        if getattr(before.gateway, key) != getattr(after.gateway, key):
            log.warning("gateway.%s has changed: restart the gateway to use it", key)
    for key in ("limits", "ledger", "telemetry"):
        if getattr(before, key) != getattr(after, key):
            log.warning("%s has changed: restart the gateway to use it", key)
    if before.responses.database != after.responses.database:
        log.warning("responses.database has changed: restart the gateway to use it")


@dataclass(frozen=True, slots=True)
class ConfigurationFiles:
    """Where a gateway reads its configuration from: `path`, if there is one, and the environment."""

    path: Path | None
    env: Mapping[str, str]

    @property
    def directory(self) -> Path:
        """Where the relative paths of the configuration start."""
        return self.path.parent if self.path is not None else Path.cwd()

    def read(self) -> tuple[Config, Catalogue]:
        """The whole configuration. Raises SettingsError."""
        config = configuration.load(self.path, self.env)
        return config, self.read_catalogue(config)

    def read_catalogue(self, config: Config) -> Catalogue:
        """The catalogue, with the created models. The operator's entries must be valid; a created entry that is not is
        served with an error. Raises SettingsError."""
        catalogue = load_catalogue(config, self.path)
        names = [section.name for section in config.neurons]
        is_known = config.discovery.dns is None  # otherwise the names of nodes are found later
        for index, spec in enumerate(catalogue.models if is_known else ()):
            for key, name in unknown_nodes(spec, names):
                near = near_misses(name, names, limit=1)
                nodes = f"the nodes are {', '.join(names)}" if names else "add it under [[neurons]]"
                advice = f"there is no such node; {f'did you mean `{near[0]}`?' if near else nodes}"
                raise self._catalogue_error(config, f"{key} of {spec.id} names {name}", ("models", index, key), advice)
        for alias, target in catalogue.alias_targets.items():
            if target in catalogue.aliases:
                what, advice = f"alias {alias} points to the alias {target}", "aliases are not chained; name the model"
                raise self._catalogue_error(config, what, ("aliases", alias), advice)
        return joined(catalogue, self._created(config).read())

    def _created(self, config: Config) -> CreatedModels:
        return CreatedModels(config.state_directory(self.directory))

    def check_aliases(self, config: Config, catalogue: Catalogue, listed: Collection[str]) -> None:
        """Raises SettingsError for an operator's alias of a model that neither the catalogue nor `listed` has."""
        configured = without_entries(catalogue, self._created(config).read())
        for alias, target in configured.alias_targets.items():
            if not catalogue.has(target) and target not in listed:
                near = near_misses(target, catalogue.ids | set(listed), limit=1)
                advice = f"did you mean `{near[0]}`?" if near else "correct it, or add the model"
                what = f"alias {alias} points to {target}, which neither the catalogue nor a node has,"
                raise self._catalogue_error(config, what, ("aliases", alias), advice)

    def _catalogue_error(self, config: Config, what: str, key: tuple[str | int, ...], advice: str) -> SettingsError:
        file = catalogue_path(config, self.path)
        return Source(file, positions(file.read_text(encoding="utf-8"))).error(what, key, advice)

    def stamps(self, config: Config) -> dict[Path, Stamp]:
        """The files of `config`, each with a value that changes when the file does."""
        authorities = (config.ca_file(neuron, self.directory) for neuron in config.neurons)
        created = self._created(config).path  # another gateway may have written it
        files = (self.path, catalogue_path(config, self.path), created, *authorities)
        return {file: stamp(file) for file in files if file is not None}


def unknown_nodes(spec: ModelSpec, names: Collection[str]) -> Iterator[tuple[str, str]]:
    """The keys of `spec` that name a node which is not in `names`, each with that node."""
    for key, wanted in (("pinned_on", spec.pinned_on), ("only_on", spec.only_on), ("nodes", spec.node_names)):
        for name in sorted(set(wanted) - set(names)):
            yield key, name


def authority_stamps(config: Config, directory: Path) -> dict[str, Stamp]:
    """A value for each node with a `ca_file` that changes when the file does."""
    files = {neuron.name: config.ca_file(neuron, directory) for neuron in config.neurons}
    return {name: stamp(file) for name, file in files.items() if file is not None}


def load_catalogue(config: Config, path: Path | None) -> Catalogue:
    """`models.toml` in the folder of the configuration; an empty catalogue when there is none. Raises SettingsError,
    also when the configuration names another file that does not exist."""
    catalogue = catalogue_path(config, path)
    if not catalogue.exists() and config.gateway.models == GatewaySection().models:
        return Catalogue()
    return settings.load(Catalogue, catalogue, env_prefix="", env={})


def catalogue_path(config: Config, path: Path | None) -> Path:
    return (path.parent if path is not None else Path.cwd()) / config.gateway.models
