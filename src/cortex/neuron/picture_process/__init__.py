"""Pictures of requests, decoded in processes that can be killed: the process, its protocol, its client."""
