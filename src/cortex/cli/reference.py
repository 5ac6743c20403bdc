"""Writes docs/configuration.md from the configuration types: `python -m cortex.cli.reference docs/configuration.md`."""

from __future__ import annotations

import sys
from pathlib import Path

from cortex.fleet.catalogue import Catalogue
from cortex.gateway.config import Config
from cortex.settings import reference

INTRODUCTION = """\
# Configuration

Generated from the types by `make docs`; edit those, not this page. Every key has a default unless marked *required*.

Any key can be set from the environment: `CORTEX_GATEWAY__LISTEN` is `gateway.listen` of `cortex.toml`,
`CORTEX_NEURONS__0__ENDPOINT` is the first node's endpoint, `NEURON_…` does the same for `neuron.toml`. The environment
takes precedence over the file. An unknown key or an invalid value is an error that names file, line and the nearest
known key.

An unknown variable that begins with `CORTEX_` is an error for every `cortex` command, and one that begins with
`NEURON_` for every `neuron` command. Commands that read no file accept names that end in `_KEY`, which may hold the
keys of nodes (`key_env`). Variables that Kubernetes sets for a service of that name, such as `CORTEX_SERVICE_HOST`, are
ignored.
"""


def configuration_page() -> str:
    """The whole page as Markdown."""
    from cortex.neuron.config import NeuronConfig

    files = (("cortex.toml", Config), ("models.toml", Catalogue), ("neuron.toml", NeuronConfig))
    parts = [f"# `{name}`\n\n{reference(kind)}".replace("\n## ", "\n### ") for name, kind in files]
    return "\n".join([INTRODUCTION, *(f"#{part}" for part in parts)])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(configuration_page(), encoding="utf-8")
