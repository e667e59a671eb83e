"""The layers: errors, checkpoint, pure files, host files, registration, then the package itself; beside it its command line.

No import points up, methods do not import each other, and pure files know neither Transformers nor PEFT.
"""

import ast
from pathlib import Path

import pytest

import hf_ext

ROOT = Path(hf_ext.__file__).parent
PURE = {
    "fm_delta": {
        "base_search",
        "batch",
        "card",
        "codec",
        "compress",
        "format",
        "likeness",
        "low_rank",
        "reference",
        "report",
        "series",
    },
    "emr": {"artifact", "card", "election", "modulators", "reference", "report", "writing"},
    "pissa": {"decomposition", "quantization", "report"},
    "trans_lora": {"card", "duplicates", "prompts", "report", "statistics"},
    "uni_med": {"boxes", "connector"},
}
HOST = {
    "fm_delta": {"callback", "config", "quantizer", "saving", "switching"},
    "emr": {"adapter", "config", "merge", "quantizer", "saving", "switching"},
    "pissa": {"card", "config", "conversion", "layer", "model", "residual"},
    "trans_lora": {
        "adapters",
        "config",
        "discriminator",
        "embedding",
        "encoding",
        "generation",
        "scoring",
        "stages",
        "synthesis",
        "teacher",
        "trainer",
        "transfer",
    },
    "uni_med": {
        "card",
        "configuration_uni_med",
        "conversion",
        "data",
        "evaluation",
        "interference",
        "modeling_uni_med",
        "processing_uni_med",
    },
}
BELOW, ABOVE = (
    ["requirements", "quiet_imports", "_native", "native", "errors", "folder", "checkpoint", "work_ahead", "display", "cards"],
    ["registration", "__init__"],
)
SHARED_HOST = ["in_place", "loading", "plan", "saving"]
FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))
every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.as_posix())


def layer(module: str) -> int:
    """The height of a module, given as `hf_ext` or `hf_ext.….name`."""
    parts = module.split(".")[1:] or ["__init__"]
    if len(parts) == 1 and parts[0] not in PURE:
        name = parts[0]
        return BELOW.index(name) if name in BELOW else 21 if name in SHARED_HOST else 30 + ABOVE.index(name)
    method, name = (*parts, "__init__")[:2]
    return 20 if name in PURE[method] else 22 if name in HOST[method] else 23 + ["__init__"].index(name)


def method(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in PURE else None


def imports(file: Path) -> list[str]:
    """The modules that a file imports, wherever in it the import stands."""
    found = []
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the module in full"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            own = node.module.split(".")[0] == "hf_ext"
            found += [module if own and is_module(module) else node.module for module in inner]
    return found


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split(".")[1:])
    return path.with_suffix(".py").exists() or path.is_dir() or name == "hf_ext._native"


def module_of(file: Path) -> str:
    return ".".join(("hf_ext", *file.with_suffix("").parts)).removesuffix(".__init__")


def test_there_is_something_to_check():
    assert Path("fm_delta/quantizer.py") in FILES and "hf_ext._native" in imports(Path("native.py"))


@every_file
def test_a_file_imports_nothing_that_stands_above_it(file):
    own = layer(module_of(file))
    above = [name for name in imports(file) if name.split(".")[0] == "hf_ext" and layer(name) > own]
    assert not above


@every_file
def test_a_file_knows_nothing_of_the_command_line(file):
    assert not [name for name in imports(file) if name.split(".")[0] == "hf_ext_cli"]


@every_file
def test_a_method_does_not_import_another(file):
    own = method(module_of(file))
    others = [name for name in imports(file) if method(name) not in (None, own)]
    assert own is None or not others


@pytest.mark.parametrize("file", [file for file in FILES if len(file.parts) == 2 and file.stem in PURE[file.parts[0]]], ids=str)
def test_a_pure_file_knows_neither_transformers_nor_peft(file):
    libraries = [name for name in imports(file) if name.split(".")[0] in ("transformers", "peft", "accelerate", "datasets")]
    assert set(libraries) <= {"transformers.utils.logging"}
