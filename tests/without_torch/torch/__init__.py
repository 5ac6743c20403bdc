"""Stands before the installed torch in nodes that load no model of their own: importing the engine takes most of the
CPU time of a start. Such a node knows that it has the engine, reads and moves files, and can load nothing."""

raise ImportError("this node loads no models")
