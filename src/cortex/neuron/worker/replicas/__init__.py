"""One model that is loaded several times on a node: `host` → `extras` → `replica_set`."""
