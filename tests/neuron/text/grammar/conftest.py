from .drawing import matchers

__all__ = ["matchers"]
