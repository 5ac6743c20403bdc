"""What the next step computes: sequences, their admission and their shares of a step. Pure."""
