"""Harnesses, which run models: `harness` is the interface, `engine` the built-in engine, `command` servers."""
