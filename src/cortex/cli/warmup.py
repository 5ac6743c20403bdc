"""`neuron warmup`: compiles the kernels of models before they are first loaded."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

from cortex.cli.failures import CommandError, ExitCode
from cortex.cli.output import console, print_json

CARD_NAMES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
HUB_FILES = ("*.json",)
"""What is downloaded of a model that is not here: its config, and no weights."""


def run(models: tuple[str, ...], card: str | None, options: dict[str, Any], num_ranks: int, *, as_json: bool) -> None:
    """Raises CommandError."""
    from cortex.neuron.engine.warmup import warm_here

    rows = []
    for model in models:
        path = local_files(model)
        start = time.monotonic()
        if not as_json:
            console().print(f"{model}: compiling kernels")
        # A process of its own for each: in one, all kernels are compiled for the same card, and none can be launched.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            outcome = pool.apply(warm_here, (str(path), card, options, num_ranks))
        if isinstance(outcome, str):
            raise CommandError(f"{model}: {outcome}", "neuron warmup --help", ExitCode.CONFIG)
        seconds = round(time.monotonic() - start, 1)
        rows.append({"model": model, "card": outcome[0], "kernels": outcome[1], "seconds": seconds})
        if not as_json:
            what = f"{outcome[1]} kernels" if outcome[1] else "all kernels were compiled before"
            console().print(f"{model}: {what}, for {outcome[0]}, in {seconds} s")
    if as_json:
        print_json({"models": rows})


def local_files(model: str) -> Path:
    """Where a model's files are: a path, or those of the Hub, of which a config is downloaded if there are none."""
    path = Path(model).expanduser()
    if path.exists():
        return path
    if model.count("/") != 1:
        raise _missing(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except HFValidationError as error:  # no name that the Hub could have
        raise _missing(model) from error
    except LocalEntryNotFoundError:
        pass
    try:
        return Path(snapshot_download(model, allow_patterns=list(HUB_FILES)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CommandError(
            f"the config of {model} cannot be downloaded: {error}", "check the name and the network"
        ) from error


def _missing(model: str) -> CommandError:
    return CommandError(
        f"there is no {model}", "name a directory, a GGUF file, or OWNER/NAME on the Hub", ExitCode.USAGE
    )
