"""Logging of every program, and traces: spans from the client to the engine, through every program on the way.

Nothing is imported here: processes of pools need only `logs`.
"""
