"""Prints one line where a package is missing, instead of a traceback. Programs import it before other packages."""

import sys
from types import TracebackType

INSTALLED_AS = {"PIL": "pillow", "hf_ext": "-e ."}


def name_missing_package(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Replaces `sys.excepthook`."""
    if isinstance(error, ModuleNotFoundError) and error.name and "." not in error.name:
        name = INSTALLED_AS.get(error.name, error.name)
        print(f"{sys.argv[0]} requires the package {error.name}. Run: pip install {name}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = name_missing_package
