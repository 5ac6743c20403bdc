"""A configuration with every kind of key, and the error of a text that is none."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest

from cortex.settings import Listen, Section, SettingsError, loads


class Gateway(Section, frozen=True):
    listen: Listen = Listen("127.0.0.1:31313")
    workers: Annotated[int, msgspec.Meta(ge=1)] = 1
    data_dir: Path | None = None
    title: str = "fleet"
    debug: bool = False
    timeout_s: float = 30.0


class Eviction(Section, frozen=True):
    strategy: Literal["lru", "priority"] = "lru"


class Neuron(Section, frozen=True):
    name: str
    endpoint: str
    tags: dict[str, int] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name == "forbidden":
            raise ValueError("this name is reserved")


class Timeouts(Section, frozen=True):
    idle_s: Annotated[float, msgspec.Meta(gt=0)] = 30.0
    label: str = ""


class Config(Section, frozen=True):
    gateway: Gateway = Gateway()
    eviction: Eviction = Eviction()
    neurons: tuple[Neuron, ...] = ()
    aliases: dict[str, str] = msgspec.field(default_factory=dict)
    level: int = 0
    timeouts: Timeouts = Timeouts()

    @property
    def other_variables(self) -> frozenset[str]:
        return frozenset({"CORTEX_URL"})

    def __post_init__(self) -> None:
        if self.level == 13:
            raise ValueError("level 13 does not exist; choose another")


def load_error(text: str, env: dict[str, str] | None = None) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        loads(Config, text, file=Path("cortex.toml"), env_prefix="CORTEX_", env=env or {})
    assert "\n" not in caught.value.message
    return caught.value
