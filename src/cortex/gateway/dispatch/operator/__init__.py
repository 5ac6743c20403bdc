"""Operators' manual orders, and those that outlive a restart."""
