"""The `[[keys]]` of a `cortex.toml`: added, changed and removed in the file, for the commands.

Everything else in the file stays as the operator wrote it. Edits are atomic: the new text is validated and then
replaces the file. Edits by several processes are serialised.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cortex import settings
from cortex.gateway.config import Config, load
from cortex.gateway.ledger.groups import GroupSection
from cortex.gateway.ledger.keys import KeySection, as_toml

_TABLE = re.compile(r"\s*\[")


class KeyFileError(Exception):
    """The file cannot be edited as requested. `remedy` says what to do."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(f"{message}; {remedy}")
        self.message = message
        self.remedy = remedy


class UnknownKey(KeyFileError):
    """The file has no such key."""


class AmbiguousKey(KeyFileError):
    """Several keys have that name."""


class NameTaken(KeyFileError):
    """Another key has that name."""


@dataclass(frozen=True, slots=True)
class KeyFile:
    """One configuration file. Calls block. Each raises KeyFileError, SettingsError or OSError, and then nothing has
    changed."""

    path: Path

    def add(self, section: KeySection, *, replace: bool = False) -> None:
        """Append the key to the file, which must be valid before and after; with `replace`, replace the key of that
        name. Raises NameTaken."""
        with self._locked():
            load(self.path, os.environ)
            before = self._read()
            text = self._text()
            namesakes = [other for other in before.keys if other.name == section.name]
            if namesakes and not replace:
                raise NameTaken(
                    f"{self.path} has a key for {section.name} already",
                    "choose another name, change it with `cortex keys change`, or replace it with `--replace`",
                )
            for other in namesakes:
                text = self._without(text, other)
            text = f"{text.rstrip()}\n\n{as_toml(section)}"
            settings.loads(Config, text, file=self.path)
            self._replace(text)

    def remove(self, name_or_id: str) -> tuple[KeySection, bool]:
        """Remove the key; returns it and whether others remain."""
        with self._locked():
            before = self._read()
            section = self._find(before, name_or_id)
            left = tuple(other for other in before.keys if other is not section)
            self._edit(before, section, "", left)
        return section, bool(left)

    def change(self, name_or_id: str, changed: Callable[[KeySection], KeySection]) -> KeySection:
        """Replace the key's table by that of `changed(key)`; returns the new key. The id stays. Comments inside the
        table are lost."""
        with self._locked():
            before = self._read()
            section = self._find(before, name_or_id)
            after = changed(section)
            keys = tuple(after if other is section else other for other in before.keys)
            self._edit(before, section, as_toml(after), keys)
        return after

    def remove_all(self, keys: Iterable[KeySection], groups: Iterable[GroupSection]) -> None:
        """Remove these keys and groups, which are in the database now."""
        with self._locked():
            before, text = self._read(), self._text()
            for table, field, values in (
                ("keys", "id", [key.id for key in keys]),
                ("groups", "name", [group.name for group in groups]),
            ):
                for value in values:
                    shorter = _with_table(text, table, field, value, "")
                    if shorter is None:
                        raise self._not_editable(value)
                    text = shorter
            if settings.loads(Config, text, file=self.path) != msgspec.structs.replace(before, keys=(), groups=()):
                raise self._not_editable("a key")
            self._replace(text)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._read()  # with a clear error where there is no such file, or no such directory
        directory = os.open(self.path.resolve().parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)
            yield
        finally:
            os.close(directory)

    def _text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    def _read(self) -> Config:
        return settings.load(Config, self.path, env_prefix="CORTEX_", env={})

    def _find(self, config: Config, name_or_id: str) -> KeySection:
        found = [section for section in config.keys if name_or_id in (section.id, section.name)]
        if not found:
            raise UnknownKey(
                f"{self.path} has no key {name_or_id}",
                "see `cortex keys list`; leave out --config for a key in the database",
            )
        if len(found) > 1:
            ids = ", ".join(section.id for section in found)
            raise AmbiguousKey(f"{len(found)} keys are called {name_or_id}", f"name one by its id: {ids}")
        return found[0]

    def _edit(self, before: Config, section: KeySection, table: str, keys: tuple[KeySection, ...]) -> None:
        """Put `table` in the place of the key's table; the file must then have exactly these `keys`."""
        text = _with_table(self._text(), "keys", "id", section.id, table)
        if text is None or settings.loads(Config, text, file=self.path) != msgspec.structs.replace(before, keys=keys):
            raise self._not_editable(section.name)
        self._replace(text)

    def _without(self, text: str, section: KeySection) -> str:
        shorter = _with_table(text, "keys", "id", section.id, "")
        if shorter is None:
            raise self._not_editable(section.name)
        return shorter

    def _not_editable(self, name: str) -> KeyFileError:
        return KeyFileError(f"the table of {name} in {self.path} cannot be edited automatically", "edit it by hand")

    def _replace(self, text: str) -> None:
        """Replace the contents of the file atomically and durably, keeping its mode, its owner and a link to it. The
        new file is private until it has the mode of the old one."""
        path = self.path.resolve()
        before = path.stat()
        fresh = path.with_name(f".{path.name}.new")
        fresh.unlink(missing_ok=True)  # of an edit that was interrupted
        file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(file, "w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                made = os.fstat(file)
                if (made.st_uid, made.st_gid) != (before.st_uid, before.st_gid):
                    os.fchown(file, before.st_uid, before.st_gid)
                os.fchmod(file, stat.S_IMODE(before.st_mode))
                os.fsync(file)
            fresh.replace(path)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
        directory = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _with_table(text: str, table: str, field: str, value: str, replacement: str) -> str | None:
    """The text with `replacement` in place of the `[[table]]` whose `field` is `value`; comments and blank lines after
    it stay. None: not found."""
    begin = re.compile(rf"\s*\[\[\s*{table}\s*\]\]")
    line = re.compile(rf"""\s*{field}\s*=\s*(["'])(?P<value>.*)\1\s*(#.*)?$""")
    lines = text.splitlines(keepends=True)
    starts = [number for number, line in enumerate(lines) if _TABLE.match(line)]
    for start, end in itertools.pairwise([*starts, len(lines)]):
        while lines[end - 1].strip() == "" or lines[end - 1].lstrip().startswith("#"):
            end -= 1
        found = (line.match(each.rstrip("\n")) for each in lines[start:end])
        if begin.match(lines[start]) and any(match and match["value"] == value for match in found):
            return "".join([*lines[:start], replacement, *lines[end:]])
    return None
