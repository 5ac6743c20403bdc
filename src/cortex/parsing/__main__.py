"""`python -m cortex.parsing`: a gateway or a node starts it with the first large body; it ends with that program."""

from __future__ import annotations

import argparse
import gc

from cortex.ipc.child import attach_to_parent, name_thread
from cortex.ipc.pool_process import serve_pool
from cortex.parsing import protocol
from cortex.parsing.protocol import Job, Reply
from cortex.wire.errors import CortexError, InvalidValue
from cortex.wire.rejection import rejected


def main() -> None:
    parser = argparse.ArgumentParser(prog="cortex.parsing", description=__doc__)
    parser.add_argument("--memory-bytes", type=int, required=True, help="the most that parsing one body may allocate")
    options, control = attach_to_parent(parser)
    name_thread("cortex-parse")
    gc.disable()  # JSON has no cycles, and a collection would visit millions of objects again and again
    serve_pool(control, Job, run_job, memory_bytes=options.memory_bytes)


def run_job(job: Job) -> Reply:
    try:
        return protocol.run(job)
    except CortexError as error:
        return rejected(error)
    except RecursionError:
        return rejected(InvalidValue("The body is nested too deeply; flatten it."))


if __name__ == "__main__":
    main()
