"""Several gateway processes on one port, of which the main process makes all decisions.

The main process owns the dispatcher, the ledger and the pollers, and serves requests like the others. A worker parses,
relays and translates on its own, and asks the main process over its control socket for admission and leases: one
message there, one back, and one when the request has ended. It forwards everything that is not inference to the main
process. The leases of a worker that dies are released and the worker is replaced. Workers end with the main process.
"""
