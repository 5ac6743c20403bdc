"""Pure decisions about the fleet: what runs where, what makes room, who answers."""
