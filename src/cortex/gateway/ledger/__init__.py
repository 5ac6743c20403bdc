"""API keys, their limits, and the usage records.

Limits are checked in memory (`meter`, `limits`); usage reaches the database in batches, off the event loop (`ledger`,
`store`).
"""
