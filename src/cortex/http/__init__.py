"""The data path: bytes between a client's connection and a node's, and nothing else.

`server` accepts requests and hands each one out as an `Exchange`; `upstream` keeps connections to one node and sends
requests on them; `relay` joins the two. Routing, retries, keys, metrics and error texts belong to the caller.

Everything here runs on the thread of one event loop and is callback-driven: a relayed request costs no task.
"""
