"""What runs models: `harness` is the interface, `engine` the built-in engine behind it, `command` servers."""
