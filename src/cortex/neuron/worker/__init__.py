"""Device workers: one process per device that runs models on it.

In the daemon: `replicas` (a model several times) → `group` (a divided model) → `supervisor` (one device), each a
`model_host`; → `process` (one worker process) → `factory` (starts workers). In the worker: `fork_server` → `worker`
(threads) → `executor` (the engine thread) → `device_model` (requests of one model), with a `step_link` between the
workers of a divided model. Both sides share `protocol`, `faults` and `memory`. `discovery` lists the host's devices,
`backoff` decides about retries.
"""
