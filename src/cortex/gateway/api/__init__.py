"""The gateway's own routes: control, the list of models, metrics."""
