"""Which node serves a request: the fleet's state, leases, queues, and the jobs that load and unload models."""
