from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from cortex.settings import Listen, Section, reference


class Timeouts(Section, frozen=True):
    """Timeouts of connections."""

    connect_s: Annotated[float, msgspec.Meta(gt=0)] = 2.0
    """To open a connection."""


class Node(Section, frozen=True):
    """A host of the fleet."""

    name: str
    """The name in logs
    and tables."""
    kind: Literal["neuron", "openai"] = "neuron"


class Config(Section, frozen=True):
    """The gateway's file."""

    listen: Listen = Listen("127.0.0.1:1")
    """Where it listens."""
    tags: tuple[str, ...] = ("a",)
    title: str | None = None
    verbose: bool = False
    timeouts: Timeouts = Timeouts()
    nodes: tuple[Node, ...] = ()
    """Hosts, in order of preference."""
    names: dict[str, str | Node] = msgspec.field(default_factory=dict)
    """Other names."""
    extra: dict[str, Timeouts] = msgspec.field(default_factory=dict)


def test_writes_one_table_for_each_section_of_the_types() -> None:
    assert reference(Config) == (
        "The gateway's file.\n"
        "\n"
        "| key | type | default | meaning |\n"
        "|---|---|---|---|\n"
        '| `listen` | host:port | `"127.0.0.1:1"` | Where it listens. |\n'
        '| `tags` | list of text | `["a"]` |  |\n'
        "| `title` | text |  |  |\n"
        "| `verbose` | true or false | `false` |  |\n"
        "| `names` | table of text or table | `{}` | Other names. |\n"
        "\n"
        "## `[timeouts]`\n"
        "\n"
        "Timeouts of connections.\n"
        "\n"
        "| key | type | default | meaning |\n"
        "|---|---|---|---|\n"
        "| `connect_s` | number > 0 | `2.0` | To open a connection. |\n"
        "\n"
        "## `[[nodes]]`\n"
        "\n"
        "Hosts, in order of preference.\n"
        "\n"
        "A host of the fleet.\n"
        "\n"
        "| key | type | default | meaning |\n"
        "|---|---|---|---|\n"
        "| `name` | text | required | The name in logs and tables. |\n"
        '| `kind` | "neuron" or "openai" | `"neuron"` |  |\n'
        "\n"
        "## `[names.NAME]`\n"
        "\n"
        "A host of the fleet.\n"
        "\n"
        "| key | type | default | meaning |\n"
        "|---|---|---|---|\n"
        "| `name` | text | required | The name in logs and tables. |\n"
        '| `kind` | "neuron" or "openai" | `"neuron"` |  |\n'
        "\n"
        "## `[extra.NAME]`\n"
        "\n"
        "Timeouts of connections.\n"
        "\n"
        "| key | type | default | meaning |\n"
        "|---|---|---|---|\n"
        "| `connect_s` | number > 0 | `2.0` | To open a connection. |\n"
    )
