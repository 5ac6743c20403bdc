"""What an engine raises. The device worker maps these onto the wire's error tree."""


class EngineError(Exception):
    """Base: the message is fit for a user."""


class LoadError(EngineError):
    """The model cannot be loaded: bad files, unsupported architecture, or it does not fit."""


class NoRoomError(LoadError):
    """It does not fit into what the device has free now; with others gone it may."""


class LoadCancelled(EngineError):
    """The load was called off before it finished; nothing of it is left."""


class SleepError(EngineError):
    """It cannot be put to sleep: it has work, or the host has no memory for its weights. It is awake as before."""


class DamagedError(EngineError):
    """The model woke up as another than it fell asleep. It is of no use any more: close it, and load it anew."""


class RequestError(EngineError):
    """This request can never be served: too long, or a parameter out of range."""


class StepBlamed(EngineError):
    """A step failed because of one request; `__cause__` says how. Its neighbours can go on once it is cancelled."""

    def __init__(self, request_id: str) -> None:
        # Without the id: clients choose it, and errors are classified by their text.
        super().__init__("a step failed because of this request alone")
        self.request_id = request_id
