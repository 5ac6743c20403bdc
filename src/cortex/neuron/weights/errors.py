"""Errors of reading and downloading models. Every message is one line, written for the user of the model."""


class CheckpointError(Exception):
    """Base class: the files of the model cannot be used. The message says what to do next."""


class FilesMissing(CheckpointError):
    """The path or a file that the model needs does not exist or cannot be read."""


class Malformed(CheckpointError):
    """A file is truncated, corrupt or hostile: its contents are inconsistent."""


class Unsupported(CheckpointError):
    """The file is valid, but its version, architecture or data type is not supported."""


class TensorMissing(CheckpointError):
    """The checkpoint has no tensor of that name, or it does not have the shape that the model needs."""


class HubError(CheckpointError):
    """A model could not be downloaded from the hub."""


class NotOnHub(HubError):
    """The hub has no such repository, revision or quantisation, or access to it is denied."""


class HubUnreachable(HubError):
    """The hub did not respond, and the cache does not hold the complete model."""


class DownloadCorrupt(HubError):
    """The downloaded bytes do not match the size or digest from the hub."""


class NoDiskSpace(HubError):
    """The model does not fit on the disk of the cache."""


class Cancelled(Exception):
    """The caller cancelled the work. This is not a failure of the model."""
