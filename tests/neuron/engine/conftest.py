from .tiny_engine import alone, checkpoint, make_engine

__all__ = ["alone", "checkpoint", "make_engine"]
