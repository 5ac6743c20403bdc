"""The entry points of the programs `cortex` and `neuron`.

Importing the commands takes a noticeable time. Until that is done, Ctrl-C ends the process without a traceback. So this
module imports nothing else first.
"""

import os
import signal
import sys


def _set_interrupt(*, is_silent: bool) -> None:
    """Let SIGINT end the process directly, or raise KeyboardInterrupt again. Where SIGINT is ignored, it stays so."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL if is_silent else signal.default_int_handler)


def cortex() -> None:
    _set_interrupt(is_silent=True)
    from cortex.cli.cortex import main

    _set_interrupt(is_silent=False)
    main()


def neuron() -> None:
    _set_interrupt(is_silent=True)
    from cortex.cli.neuron import main

    _set_interrupt(is_silent=False)
    main()


def single_file() -> None:
    """Both programs in one file: it is `neuron` under a name that begins so, or with `neuron` as its first argument."""
    if os.path.basename(sys.argv[0]).startswith("neuron"):
        neuron()
    elif sys.argv[1:2] == ["neuron"]:
        sys.argv[:2] = ["neuron"]
        neuron()
    else:
        cortex()
