"""What goes wrong, by kind. Every message names the file or tensor, what was found and what to do next."""


class HfExtError(Exception):
    """Base of all errors that this package raises on purpose."""


class CorruptFileError(HfExtError, ValueError):
    """A file does not hold what its writer wrote, or was made by a newer version."""


class BaseModelError(HfExtError, ValueError):
    """The base model of a compressed checkpoint is missing or is another one."""


class CheckpointError(HfExtError, ValueError):
    """A checkpoint cannot be used for what was asked."""


class MissingDependencyError(HfExtError, ImportError):
    """A method needs the C++ extension, which is not built, or a package that is not installed."""


class ServerError(HfExtError, ConnectionError):
    """A server that was to write texts does not answer."""


class UnsavedChangesError(HfExtError, RuntimeError):
    """The weights of a model are not those of its active task any more, and switching would lose them."""

    def __init__(self, task: str, parameter: str):
        super().__init__(
            f"'{parameter}' is not as task '{task}' has it: the model was changed since. Save it first (save_pretrained writes "
            "it as a plain checkpoint), then switch with set_task(…, discard_changes=True)."
        )
        self.parameter = parameter
