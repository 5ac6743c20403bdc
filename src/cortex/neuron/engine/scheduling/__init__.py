"""Plans the next step: sequences, their admission and their shares of a step. Pure."""
