"""A pool whose jobs do what a test asks: `python -m pool_jobs`."""

from __future__ import annotations

import argparse
import os
import time

import msgspec

from cortex.ipc.child import attach_to_parent
from cortex.ipc.pool_process import serve_pool


class Job(msgspec.Struct, frozen=True, array_like=True):
    kind: str
    number: int = 0


class Done(msgspec.Struct, frozen=True, array_like=True):
    process_id: int
    number: int


def run_job(job: Job) -> Done:
    match job.kind:
        case "never":
            while True:
                time.sleep(3600)
        case "crash":
            os.abort()
        case "allocate":
            bytearray(job.number)
    return Done(os.getpid(), job.number)


if __name__ == "__main__":
    _, control = attach_to_parent(argparse.ArgumentParser())
    serve_pool(control, Job, run_job, memory_bytes=64 << 20)
