"""Several processes on one port, with one that decides.

The main process owns the dispatcher, the books and the polls, and serves like the others. Each other worker parses,
relays and translates by itself, and asks the main process over a Unix socket for admission and leases: one message
there, one back, and one when the request has ended. Everything that is not inference is passed on to the main process
as it came. A worker that dies gives its leases back and is replaced; workers end with the main process.
"""
