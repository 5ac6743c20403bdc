"""How many examples property tests get."""

import hypothesis

MANY = hypothesis.settings(max_examples=max(100, hypothesis.settings().max_examples))
"""Decorates tests of hostile input and of long histories, whose examples cost little: 100 of them, and more in
`make fuzz`."""
