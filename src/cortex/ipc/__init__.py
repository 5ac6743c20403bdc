"""Messages between processes of one host, and child processes that end with their parent."""
