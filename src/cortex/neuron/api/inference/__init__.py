"""The inference routes: a request in any dialect, run on the node, streamed or whole."""
