"""The routes of a node besides inference: control, models, token counts, metrics."""
