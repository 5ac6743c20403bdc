"""Bookkeeping of KV pages and recurrent state slots. Pure; the memory itself is in `memory/`."""
