"""The errors of this package. Each message names the file or tensor, what was found, and what to do next."""


class HfExtError(Exception):
    """The base class of all errors that this package raises."""


class CorruptFileError(HfExtError, ValueError):
    """A file is damaged, or was written by a newer version."""


class BaseModelError(HfExtError, ValueError):
    """The base model of a checkpoint is missing, or is another model."""


class CheckpointError(HfExtError, ValueError):
    """A checkpoint cannot be used for the requested operation."""


class AdapterError(HfExtError, ValueError):
    """A configuration has options that its adapter does not support, or the model cannot take the adapter."""


class MissingDependencyError(HfExtError, ImportError):
    """A method needs the C++ extension, which is not built, or a package that is not installed."""


class ServerError(HfExtError, ConnectionError):
    """A server cannot be reached, or rejects a request."""


class UnsavedChangesError(HfExtError, RuntimeError):
    """The weights of a model were changed since its active task was loaded; switching would lose the changes."""

    def __init__(self, task: str, parameter: str):
        super().__init__(
            f"'{parameter}' was changed since task '{task}' was loaded. Save the model first (save_pretrained writes a plain "
            "checkpoint), then switch with set_task(…, discard_changes=True)."
        )
        self.parameter = parameter
