"""Downloads models from the hub into the hub's own cache layout, which other tools share.

Written on the standard library. The official client drops a partial file when a download fails, does not check digests
over plain HTTP and cannot be cancelled; a node needs all three.
"""

from cortex.neuron.weights.hub.resolver import resolve

__all__ = ["resolve"]
