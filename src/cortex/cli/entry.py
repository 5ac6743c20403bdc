"""The entry points of the programs `cortex` and `neuron`.

Importing the commands takes a noticeable time. Until that is done, Ctrl-C ends the process without a traceback.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def _silent_interrupt() -> Iterator[None]:
    """Let SIGINT end the process directly. A shell's background job, which ignores SIGINT, keeps ignoring it."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, handler)


def cortex() -> None:
    with _silent_interrupt():
        from cortex.cli.cortex import main
    main()


def neuron() -> None:
    with _silent_interrupt():
        from cortex.cli.neuron import main
    main()
