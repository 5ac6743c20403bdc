"""From where the real programs are started that tests use."""

import os
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"

_FOLDERS = [SOURCE] if Path("/dev/nvidiactl").exists() else [Path(__file__).parent / "without_triton", SOURCE]

PYTHONPATH = os.pathsep.join(map(str, _FOLDERS))
"""The source, and without a GPU no Triton."""

WITHOUT_TORCH = os.pathsep.join((str(Path(__file__).parent / "without_torch"), PYTHONPATH))
"""The same for a node that loads no model of its own."""
