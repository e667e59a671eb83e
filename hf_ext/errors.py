"""What goes wrong, by kind. Every message names the file or tensor, what was found and what to do next."""


class HfExtError(Exception):
    """Base of all errors that this package raises on purpose."""


class CorruptFileError(HfExtError, ValueError):
    """A file does not hold what its writer wrote, or was made by a newer version."""


class BaseModelError(HfExtError, ValueError):
    """The base model of a compressed checkpoint is missing or is another one."""


class CheckpointError(HfExtError, ValueError):
    """A checkpoint cannot be used for what was asked."""
