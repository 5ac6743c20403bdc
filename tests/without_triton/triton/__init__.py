"""Stands before the installed Triton in programs that tests start on a machine without a GPU: on such a machine users
do not have it, and importing it takes a sixth of the engine's start."""

raise ImportError("not on a machine without a GPU")
