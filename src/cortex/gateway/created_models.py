"""Models that clients of the API have created (`/api/create`, `cortex create`): entries of the catalogue, in a file of
the gateway's state. What `models.toml` has takes precedence."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cortex.fleet.catalogue import Alias, Catalogue, ModelSpec
from cortex.settings import SettingsError
from cortex.system import private_file
from cortex.wire.words import about

FILE_NAME = "created-models.json"


class CreatedModels:
    """The file. Blocking, but small."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE_NAME

    def read(self) -> Catalogue:
        """Its entries. Raises SettingsError."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=Catalogue)
        except FileNotFoundError:
            return Catalogue()
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as problem:
            raise SettingsError(f"{about(str(self.path), problem)}; correct it, or delete it") from problem

    def write(self, entries: Catalogue) -> None:
        """Replace the entries, atomically. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        private_file.write(self.path, msgspec.json.format(msgspec.json.encode(entries)) + b"\n")  # may have prompts


def joined(configured: Catalogue, created: Catalogue) -> Catalogue:
    """`configured` with the entries of `created` whose names it does not have."""
    taken = configured.ids | set(configured.aliases)
    aliases = {name: alias for name, alias in created.aliases.items() if name not in taken}
    models = tuple(spec for spec in created.models if spec.id not in taken)
    return msgspec.structs.replace(
        configured, models=(*configured.models, *models), aliases={**configured.aliases, **aliases}
    )


def with_entry(created: Catalogue, name: str, entry: ModelSpec | Alias | None) -> Catalogue:
    """`created` with `entry` as `name`; None: without it."""
    models = tuple(spec for spec in created.models if spec.id != name)
    aliases = {each: alias for each, alias in created.aliases.items() if each != name}
    if isinstance(entry, ModelSpec):
        models = (*models, entry)
    elif entry is not None:
        aliases[name] = entry
    return Catalogue(models=models, aliases=aliases)


def without_entries(joined: Catalogue, created: Catalogue) -> Catalogue:
    """The catalogue that `joined` extended with `created`."""
    models = tuple(spec for spec in joined.models if spec not in created.models)
    aliases = {name: alias for name, alias in joined.aliases.items() if created.aliases.get(name) != alias}
    return msgspec.structs.replace(joined, models=models, aliases=aliases)
