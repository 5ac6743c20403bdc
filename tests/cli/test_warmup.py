"""`neuron warmup`: which files it takes, and what it says where it cannot compile."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner

from cortex.cli import warmup
from cortex.cli.failures import CommandError
from cortex.cli.neuron import neuron
from cortex.neuron.engine.request import LoadSpec


def test_local_folders_and_files_are_taken_as_they_are(tmp_path: Path) -> None:
    assert warmup.local_files(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["no-such-folder", "a/b/c", "~/missing", "my model/x"])
def test_rejects_what_is_neither_here_nor_a_name_on_the_hub(name: str) -> None:
    with pytest.raises(CommandError, match="there is no"):
        warmup.local_files(name)


def test_cached_files_of_the_hub_are_preferred_to_a_download(tmp_path: Path) -> None:
    with mock.patch("huggingface_hub.snapshot_download", return_value=str(tmp_path)) as download:
        assert warmup.local_files("owner/name") == tmp_path
    download.assert_called_once_with("owner/name", local_files_only=True)


def test_options_reach_the_load_that_is_rehearsed(tmp_path: Path) -> None:
    with mock.patch.object(warmup, "run") as run:
        arguments = ["warmup", str(tmp_path), "--quant", "q4", "--card", "sm_90", "--tensor-parallel", "2"]
        outcome = CliRunner().invoke(neuron, arguments)
    assert outcome.exit_code == 0, outcome.output
    (models, card, spec, num_ranks), _ = run.call_args
    assert (models, card, num_ranks) == ((str(tmp_path),), "sm_90", 2)
    assert spec == LoadSpec("", quant="q4", kv_dtype="auto", context_tokens=None, max_num_seqs=256)


def test_rejects_an_unknown_card(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(neuron, ["warmup", str(tmp_path), "--card", "sm_1"])
    assert outcome.exit_code != 0
    assert "sm_90" in outcome.output


def end_at_once(_connection: Connection, *_arguments: object) -> None:
    os._exit(7)


def die_at_once(_connection: Connection, *_arguments: object) -> None:
    """As a process does that is killed for lack of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("compile", "ending"), [(end_at_once, "exit code 7"), (die_at_once, "killed by SIGKILL")])
def test_process_that_ends_early_is_reported(
    compile: Callable[..., None], ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmup, "_compile", compile)
    with pytest.raises(CommandError, match=ending):
        warmup.run((str(tmp_path),), "sm_90", LoadSpec(""), 1, as_json=True)
