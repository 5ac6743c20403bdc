import sys
from pathlib import Path

FAULTY = str(Path(__file__).parent.parent / "faulty")
if FAULTY not in sys.path:
    sys.path.append(FAULTY)  # workers import from where the daemon does
