"""Keys that have another name or no meaning any more."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortex.settings import loads

from .example_config import Config, Timeouts, load_error


@pytest.mark.parametrize(
    ("text", "env", "location"),
    [
        ("[timeouts]\npatience_s = 5", {}, "timeouts.patience_s in cortex.toml line 2"),
        (
            "",
            {"CORTEX_TIMEOUTS__PATIENCE_S": "5"},
            "timeouts.patience_s in environment variable CORTEX_TIMEOUTS__PATIENCE_S",
        ),
    ],
)
def test_renamed_key_works_and_warns(
    text: str, env: dict[str, str], location: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = loads(Config, text, file=Path("cortex.toml"), env_prefix="CORTEX_", env=env)
    assert config.timeouts.idle_s == 5.0
    assert [record.getMessage() for record in caplog.records] == [
        f"{location} is now called `timeouts.idle_s`: rename it"
    ]


@pytest.mark.parametrize(
    ("text", "env", "location"),
    [
        ("patience_s = 5\n[timeouts]\nlabel = 'a'", {}, "patience_s in cortex.toml line 1"),
        ("[timeouts]\nlabel = 'a'", {"CORTEX_PATIENCE_S": "5"}, "patience_s in environment variable CORTEX_PATIENCE_S"),
    ],
)
def test_key_that_moved_into_a_table_works_and_warns(
    text: str, env: dict[str, str], location: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = loads(Config, text, file=Path("cortex.toml"), env_prefix="CORTEX_", env=env)
    assert config.timeouts == Timeouts(idle_s=5.0, label="a")
    assert [record.getMessage() for record in caplog.records] == [
        f"{location} is now called `timeouts.idle_s`: rename it"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("patience_s = 0", "invalid value for patience_s in cortex.toml line 1: expected number > 0, got 0"),
        (
            "patience_s = 1\n[timeouts]\nidle_s = 2",
            "two names for one key: patience_s in cortex.toml line 1: keep only `timeouts.idle_s`, its new name",
        ),
        (
            "patience_s = 1\ntimeouts = 3",
            "invalid value for timeouts in cortex.toml line 2: expected table, got 3",
        ),
    ],
)
def test_error_of_a_key_that_moved_names_it_as_written(text: str, message: str) -> None:
    assert load_error(text).message == message


def test_renamed_key_in_environment_keeps_its_type() -> None:
    assert loads(Config, "", env_prefix="CORTEX_", env={"CORTEX_TIMEOUTS__TOKEN": "42"}).timeouts.label == "42"


def test_error_in_renamed_key_names_the_key_as_written() -> None:
    assert load_error("[timeouts]\npatience_s = 0").message == (
        "invalid value for timeouts.patience_s in cortex.toml line 2: expected number > 0, got 0"
    )


def test_rejects_former_and_present_name_of_a_key_together() -> None:
    assert load_error("[timeouts]\nidle_s = 1\npatience_s = 2").message == (
        "two names for one key: timeouts.patience_s in cortex.toml line 3: keep only `idle_s`, its new name"
    )


@pytest.mark.parametrize(
    ("text", "env", "location"),
    [
        ("[timeouts]\nretries = 'any value'\nidle_s = 5", {}, "timeouts.retries in cortex.toml line 2"),
        (
            "[timeouts]\nidle_s = 5",
            {"CORTEX_TIMEOUTS__RETRIES": "3"},
            "timeouts.retries in environment variable CORTEX_TIMEOUTS__RETRIES",
        ),
    ],
)
def test_removed_key_warns_and_has_no_effect(
    text: str, env: dict[str, str], location: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = loads(Config, text, file=Path("cortex.toml"), env_prefix="CORTEX_", env=env)
    assert config == Config(timeouts=Timeouts(idle_s=5.0))
    assert [record.getMessage() for record in caplog.records] == [
        f"{location} has no effect any more: every request is sent once. Remove it"
    ]
