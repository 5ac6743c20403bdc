"""Variables in the commands of servers."""

from __future__ import annotations

import pytest

from cortex.neuron.node.harness.command.harness import Expansion, uses
from cortex.neuron.servers.entry import HarnessEntry
from cortex.wire.errors import LoadFailed

EXPANSION = Expansion({"PORT": "80", "MODEL_ID": "a b ${PORT}", "CONTEXT": None}, {"HOME": "/h o"}, "fake")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("run --port ${PORT}", ["run", "--port", "80"]),
        ("run --port=${PORT},${PORT}", ["run", "--port=80,80"]),
        ("run ${MODEL_ID}", ["run", "a b ${PORT}"]),
        (("run it", "-x ${MODEL_ID}"), ["run it", "-x a b ${PORT}"]),
        ("\"a dir/run\" 'x  y' ${env.HOME}/z", ["a dir/run", "x  y", "/h o/z"]),
        ("run $PORT $(PORT) {PORT}", ["run", "$PORT", "$(PORT)", "{PORT}"]),
        ("", []),
    ],
)
def test_a_value_stays_within_its_argument(command: str | tuple[str, ...], expected: list[str]) -> None:
    assert EXPANSION.command(HarnessEntry(name="x", cmd=command).commands["cmd"]) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("${CONTEXT}", "needs .{CONTEXT}; set `context_tokens` of the model"),
        ("${port}", "uses .{port}, which does not exist; there are .{PORT}, .{MODEL_ID}, .{CONTEXT}, .{env.NAME}"),
        ("${env.NOPE}", "needs the environment variable NOPE"),
    ],
)
def test_what_has_no_value_is_an_error(text: str, reason: str) -> None:
    with pytest.raises(LoadFailed, match=reason):
        EXPANSION.text(text)


def test_variables_are_found_in_commands_and_environment() -> None:
    entry = HarnessEntry(name="x", cmd="run ${MODEL_ID}", env={"P": "${PORT}"}, cmd_stop="kill ${PID}")
    assert [uses(entry, name, None) for name in ("MODEL_ID", "PORT", "PID", "MODEL_PATH")] == [True, True, True, False]
