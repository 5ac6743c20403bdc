"""Pure decisions about the fleet: placement, eviction, queueing and routing."""
