"""Device workers: one process per device that runs models on it.

In the daemon: `hosts` (of models, each a `model_host`) → `supervisor` (the worker of one device) → `process` (one
worker process) → `factory` (of workers, from a fork server). `program` runs in the workers. Both sides share
`protocol`, `faults` and `memory`. `discovery` lists the host's devices, `backoff` decides about retries.
"""
