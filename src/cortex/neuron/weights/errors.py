"""What reading or fetching a model can end in. Every message is one line for the person who asked for the model."""


class CheckpointError(Exception):
    """Base: the model's files cannot be used; the message says what to do next."""


class FilesMissing(CheckpointError):
    """The place exists or not, but a file that a model needs is not there."""


class Malformed(CheckpointError):
    """A file is truncated, corrupt or hostile: what it says about itself cannot be true."""


class Unsupported(CheckpointError):
    """The file is sound, but of a version, architecture or number format that is not read here."""


class TensorMissing(CheckpointError):
    """The checkpoint has no tensor of that name, or not with the shape the model needs."""


class HubError(CheckpointError):
    """A model could not be fetched from the hub."""


class NotOnHub(HubError):
    """The hub knows no such repository, revision or quantisation, or does not show it to us."""


class HubUnreachable(HubError):
    """The hub did not answer, and the cache does not hold the whole model."""


class DownloadCorrupt(HubError):
    """The bytes that came are not the bytes the hub promised."""


class DiskFull(HubError):
    """The model does not fit where the cache lives."""


class Cancelled(Exception):
    """The caller called the work off; nothing is wrong with the model."""
