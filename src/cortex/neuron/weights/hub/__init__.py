"""Models from the hub, kept in the hub's own cache layout, so that other tools find them and we find theirs.

Written on the standard library: the official client drops a half-finished file when a download fails, does not check
digests over plain HTTP and cannot be called off, which are the three things a node needs from it.
"""

from cortex.neuron.weights.hub.resolver import resolve

__all__ = ["resolve"]
