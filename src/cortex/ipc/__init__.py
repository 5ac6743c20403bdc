"""Messages between processes of one host, and child processes that end with their parent.

`channel` carries batches of messages on a stream socket, `packets` single messages with file descriptors, and `child`
starts processes. `pool` runs jobs in processes that can be killed. Device workers, tokenizer processes and `cortex up`
use these.
"""
