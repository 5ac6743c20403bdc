"""`python -m cortex.neuron.picture_process`: started by the daemon with the first picture, ends with the daemon.

Its workers decode pictures, one at a time. One that exceeds a limit, or that a file crashes, is ended and replaced.
"""

from __future__ import annotations

import argparse
import logging

from PIL import GifImagePlugin, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from cortex.ipc.child import attach_to_parent, name_thread
from cortex.ipc.pool_process import serve_pool
from cortex.neuron.picture_process.decoding import decode
from cortex.neuron.picture_process.protocol import Decode, Decoded, Reply
from cortex.neuron.vision.preparing import prepare
from cortex.wire.errors import CortexError
from cortex.wire.pictures.header import UnreadablePicture
from cortex.wire.pictures.parts import invalid
from cortex.wire.rejection import rejected

log = logging.getLogger(__name__)

_LOADED = (GifImagePlugin, JpegImagePlugin, PngImagePlugin, WebPImagePlugin)
"""Imported before the workers are forked, so that they start at once."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="cortex.neuron.picture_process", description=__doc__)
    parser.add_argument("--memory-bytes", type=int, required=True, help="the most that decoding a picture may allocate")
    parser.add_argument("--cpu-s", type=int, required=True, help="the most that decoding a picture may compute")
    options, control = attach_to_parent(parser)
    name_thread("neuron-pictures")
    serve_pool(control, Decode, run_job, memory_bytes=options.memory_bytes, cpu_s=options.cpu_s)


def run_job(job: Decode) -> Reply:
    """MemoryError ends the worker, so that the next job has all of the memory."""
    try:
        return Decoded(prepare(job.spec, job.grid, decode(job.body)).tobytes())
    except UnreadablePicture as problem:
        return rejected(invalid(job.param, f"the picture cannot be read: {problem}"))
    except MemoryError:
        raise
    except Exception:
        log.exception("preparing a picture failed")
        return rejected(CortexError("Internal error while a picture was prepared; the node's log has the details."))


if __name__ == "__main__":
    main()
