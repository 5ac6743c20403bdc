"""The files of a gateway's configuration: `cortex.toml`, and the catalogue in the same folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cortex import settings
from cortex.fleet.catalogue import Catalogue
from cortex.gateway import config as configuration
from cortex.gateway.config import Config, GatewaySection
from cortex.settings import Stamp, stamp


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
        return config, load_catalogue(config, self.path)

    def stamps(self, config: Config) -> tuple[Stamp, ...]:
        """A value that changes when a file of `config` does."""
        own = tuple(stamp(file) for file in (self.path, catalogue_path(config, self.path)) if file is not None)
        return (*own, *authority_stamps(config, self.directory).values())


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
