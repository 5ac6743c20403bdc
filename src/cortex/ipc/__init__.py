"""Messages between processes of one host, and child processes that end with their parent.

`channel` carries messages on a socket, `loop_channel` on an event loop. `child` and `start` are the two sides of a
child process. A `fork_server` forks workers from a warm process; `fork_client` starts it and requests them. `helper` is
a table of functions that run in such workers, with limits: `pool` calls them, `helper_process` runs them, and a
`fair_queue` shares them among clients.
"""
