"""Models of the hub: their names, which files of a repository make up a model, checked listings, and the cache on disk.

The cache has the hub's own layout, which other tools share. `neuron.hub_process` downloads.
"""
