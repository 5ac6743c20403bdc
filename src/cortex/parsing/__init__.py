"""Parses large request bodies in separate processes.

Decoding JSON blocks an interpreter: a body of 60 MB that is nothing but small arrays takes tens of seconds and
gigabytes. A process of its own has limits, and is killed when the client disconnects.
"""
