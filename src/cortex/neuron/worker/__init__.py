"""Device workers: one process per device that runs models on it.

In the daemon: `supervisor` (one device) → `process` (one worker process) → `factory` (starts workers). In the worker:
`fork_server` → `worker` (threads) → `executor` (engine thread) → `loaded_model` (requests of one model). Both sides
share `protocol`, `faults` and `memory`. `discovery` lists the host's devices, `backoff` decides about retries.
"""
