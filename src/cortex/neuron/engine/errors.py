"""Errors of an engine. The device worker maps these onto the wire's error tree."""


class EngineError(Exception):
    """Base class. The message is fit for a user."""


class LoadError(EngineError):
    """The model cannot be loaded: bad files, unsupported architecture, or it does not fit."""


class UnsupportedError(LoadError):
    """No retry helps: the engine does not run this model, or not with these options."""


class InsufficientMemory(LoadError):
    """The model does not fit into the memory that is free now; it may fit after other models are unloaded."""


class LoadCancelled(EngineError):
    """The load was cancelled before it finished; nothing of it is left on the device."""


class SleepError(EngineError):
    """The model cannot sleep: it has work, or the host has no memory for its weights. It stays awake."""


class DamagedError(EngineError):
    """The model that woke is not the one that fell asleep. It is unusable: close it, and load it again."""


class RequestError(EngineError):
    """This request can never be served: too long, or a parameter out of range."""


class GroupBroken(EngineError):
    """The ranks of a divided model no longer compute the same step. The model is lost on all of them."""


class FaultyRequest(EngineError):
    """A step failed because of one request; `__cause__` has the reason. The others continue once it is cancelled."""

    def __init__(self, request_id: str) -> None:
        # Without the id: clients choose it, and errors are classified by their text.
        super().__init__("a step failed because of this request alone")
        self.request_id = request_id
