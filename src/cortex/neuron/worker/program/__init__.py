"""The program of worker processes: `worker` (threads) → `executor` (the engine thread) → `device_models` →
`device_model` (the requests of one model), with a `step_link` between the workers of a divided model.
"""
