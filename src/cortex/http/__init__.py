"""The HTTP/1.1 data path: client connections, upstream connections, and the relay between them.

`server` accepts requests and passes each one to its handler as an `Exchange`. `upstream` keeps connections to one node
and sends requests on them. `relay` joins the two. Routing, retries, keys, metrics and error texts belong to the caller.

Everything runs on the thread of one event loop, in callbacks: a relayed request needs no task.
"""
