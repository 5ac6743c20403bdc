"""`python -m cortex.gateway.workers`: started by the main process, never by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import uvloop

from cortex.gateway.workers.worker import run

if __name__ == "__main__":
    uvloop.run(run(Path(sys.argv[1]), Path(sys.argv[2])))
