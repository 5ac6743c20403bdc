"""Which page holds which tokens, and which slot which recurrent state. Pure; the memory itself is in `memory/`."""
