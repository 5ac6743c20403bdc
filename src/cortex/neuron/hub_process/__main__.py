"""`python -m cortex.neuron.hub_process`: started by the daemon for one model, ends with the daemon."""

from __future__ import annotations

import argparse
import logging

from cortex.ipc.child import attach_to_parent, name_thread
from cortex.neuron.hub_process.service import serve


def main() -> None:
    _, control = attach_to_parent(argparse.ArgumentParser(prog="cortex.neuron.hub_process", description=__doc__))
    name_thread("neuron-hub")
    client_log = logging.getLogger("huggingface_hub")  # its own handler writes in a format of its own
    client_log.handlers.clear()
    client_log.propagate = True
    serve(control)


if __name__ == "__main__":
    main()
