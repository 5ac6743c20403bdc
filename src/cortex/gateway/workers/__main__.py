"""`python -m cortex.gateway.workers`: started by the main process, never by hand."""

from __future__ import annotations

import argparse
from pathlib import Path

import uvloop

from cortex.gateway.workers.worker import run
from cortex.ipc.child import attach_to_parent

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="cortex.gateway.workers", description=__doc__)
    parser.add_argument("--api", type=int, required=True, help="file descriptor of the main process's API socket")
    options, control = attach_to_parent(parser)
    uvloop.run(run(control, Path(f"/proc/self/fd/{options.api}")))
