"""`python -m cortex.neuron.node.survey_process`: started by the daemon when it has files to read, ends with it.

Its workers read the files of models, one after the other. One that exceeds a limit is ended and replaced.
"""

from __future__ import annotations

import argparse
import logging

from cortex.ipc.child import attach_to_parent, name_thread
from cortex.ipc.pool_process import serve_pool
from cortex.neuron.node.survey_process import jobs
from cortex.neuron.node.survey_process.protocol import Job, Reply
from cortex.wire.errors import CortexError, LoadFailed
from cortex.wire.rejection import rejected

log = logging.getLogger(__name__)


def main() -> None:
    parser = argparse.ArgumentParser(prog="cortex.neuron.node.survey_process", description=__doc__)
    parser.add_argument("--memory-bytes", type=int, required=True, help="the most that reading a model may allocate")
    parser.add_argument("--cpu-s", type=int, required=True, help="the most that reading a model may compute")
    options, control = attach_to_parent(parser)
    name_thread("neuron-survey")
    serve_pool(control, Job, run_job, memory_bytes=options.memory_bytes, cpu_s=options.cpu_s)


def run_job(job: Job) -> Reply:
    """MemoryError ends the worker, so that the next job has all of the memory."""
    try:
        return jobs.run(job)
    except CortexError as error:
        return rejected(error)
    except MemoryError:
        raise
    except Exception as error:  # whatever it is, the daemon must get it
        log.warning("cannot read the files of a model", exc_info=True)
        return rejected(LoadFailed(f"its files cannot be read: {type(error).__name__}: {str(error)[:200]}"))


if __name__ == "__main__":
    main()
