"""Makes the reference of everything public from its docstrings, with pdoc: python docs/reference.py build/docs

Whatever pdoc warns of makes it fail.
"""

import inspect
import sys
import warnings
from pathlib import Path

import pdoc

import hf_ext

PAGES = tuple(f"hf_ext.{module}" for module in ("emr", "errors", "fm_delta", "pissa", "trans_lora", "uni_med", "weight_sync"))


def shorten(kind: type) -> None:
    """Leaves out of a configuration's constructor the hundred options that its base class in another library has."""
    own = {name for base in kind.__mro__ if base.__module__.startswith("hf_ext.") for name in base.__annotations__}
    parameters = inspect.signature(kind.__init__).parameters
    kept = [parameter for name, parameter in parameters.items() if name in ("self", *own)]
    rest = inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)
    inspect.unwrap(kind.__init__).__signature__ = inspect.Signature([*kept, rest])


def main(out: str) -> None:
    for kind in (hf_ext.PissaConfig, hf_ext.QPissaConfig, hf_ext.TransLoraConfig, hf_ext.UniMedConfig):
        shorten(kind)
    hf_ext.__all__ = [*hf_ext.__all__, "errors"]  # in the list of modules, too
    pdoc.render.configure(docformat="google", footer_text=f"hf_ext {hf_ext.__version__}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pdoc.pdoc("hf_ext", r"!hf_ext\..+", *PAGES, r"!hf_ext\..+\..+", output_directory=Path(out))
    if found := [str(warning.message) for warning in caught if Path(warning.filename).parent.name == "pdoc"]:
        sys.exit("\n".join(found))
    print(f"{out}/index.html")


if __name__ == "__main__":
    main(*sys.argv[1:])
