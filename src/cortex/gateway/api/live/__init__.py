"""Streams of what happens in the fleet, and what of it each key may see."""
