"""Without a C++ compiler the package installs, and only what needs the extension asks for it. A library is compiled once. It
runs on any processor of its architecture."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import HAS_PISSA
from processes import python

import hf_ext
from hf_ext.errors import HfExtError, MissingDependencyError

ROOT = Path(__file__).parents[1]

USES = """
import importlib, pkgutil, sys
# An editable install would find the checkout's extension.
sys.meta_path[:] = [finder for finder in sys.meta_path if not getattr(finder, "__module__", "").startswith("__editable__")]
sys.modules["PIL"] = None  # as if Pillow were not installed
import torch, transformers, peft
import hf_ext

for module in pkgutil.walk_packages(hf_ext.__path__, "hf_ext."):
    # These need more packages: diffusers needs Pillow.
    needing = ("hf_ext.serving.vllm.", "hf_ext.integration.loading.diffusers", "hf_ext.lora_extraction.diffusers")
    if not module.name.endswith("__main__") and not module.name.startswith(needing):
        try:
            importlib.import_module(module.name)
        except hf_ext.errors.MissingDependencyError as error:
            print(f"{module.name}: {error}")

"""
METHODS = f"""
import numpy, torch, transformers, peft
import hf_ext

if {HAS_PISSA}:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    adapted = peft.get_peft_model(model, hf_ext.PissaConfig(r=2, target_modules=["0"]))
    assert adapted(torch.ones(1, 16)).shape == (1, 16)

from hf_ext.storage import encode
weight = numpy.zeros(8, numpy.uint8)
for method in (lambda: encode(torch.ones(4)), lambda: hf_ext.emr.election.elect("F32", weight, [weight], weight)):
    try:
        method()
    except hf_ext.errors.MissingDependencyError as error:
        print(error)
"""


def build(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "-q", "build", "--build-lib", folder / "lib", "--build-temp", folder / "temp"]
    environment = os.environ | {"CC": "/nonexistent", "CXX": "/nonexistent"} | environment
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)


@pytest.mark.slow
def test_most_methods_work_without_compiler_and_pillow(tmp_path: Path) -> None:
    built = build(tmp_path)
    assert built.returncode == 0 and "*** The C++ extension of hf_ext was not built" in built.stderr, built.stderr
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "lib"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", USES + METHODS]
    used = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert used.returncode == 0, used.stderr
    errors = used.stdout.splitlines()
    for module, error in zip(["data", "evaluation", "images", "processing_uni_med"], errors[:-2], strict=True):
        assert error == f"hf_ext.uni_med.{module}: Uni-Med's images require Pillow: pip install 'pillow>=10'."
    assert_install_help(errors[-2:])


def test_without_the_extension_all_but_fm_delta_and_emr_works() -> None:
    used = python("-c", f"import sys; sys.modules['hf_ext._native'] = None\n{METHODS}")
    assert used.returncode == 0, used.stderr
    assert_install_help(used.stdout.splitlines())


def assert_install_help(errors: list[str]) -> None:
    assert len(errors) == 2
    for error in errors:
        assert "FM-Delta and EMR-Merging need the C++ extension" in error and "hf_ext._native" in error
        assert "in a checkout of hf_ext: pip install --force-reinstall --no-deps . (" in error
        assert "python setup.py build_ext --inplace" in error


def test_a_required_extension_fails_without_a_compiler(tmp_path: Path) -> None:
    built = build(tmp_path, HF_EXT_REQUIRE_EXTENSION="1")
    assert built.returncode != 0 and "/nonexistent" in built.stderr


COMPILER = """#!/bin/sh
echo "$*" >> "{calls}"
case "$*" in *"$FAILS_AT"*) exit 1 ;; esac
exec c++ "$@"
"""


@pytest.mark.skipif(sys.platform == "win32" or not shutil.which("c++"), reason="needs c++")
def test_builds_of_the_same_files_and_flags_share_one_library(tmp_path: Path) -> None:
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "hf_ext/__init__.py", "hf_ext/requirements.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    source, header = tmp_path / "csrc/module.cpp", tmp_path / "csrc/number.h"
    source.parent.mkdir()
    source.write_text('#include "number.h"\nextern "C" int PyInit__native() { return NUMBER; }')
    header.write_text("#define NUMBER 1")
    calls, compiler = tmp_path / "calls", tmp_path / "compiler"
    compiler.write_text(COMPILER.format(calls=calls))
    compiler.chmod(0o755)

    def build(**environment: str) -> tuple[int, bytes | None]:
        """Returns the number of files that were compiled, and the library, if there is one."""
        calls.write_text("")
        settings = os.environ | {"CC": str(compiler), "CXX": str(compiler), "CFLAGS": "", "FAILS_AT": "no call"} | environment
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(command, cwd=tmp_path, env=settings, check=True, capture_output=True, timeout=100)
        library = next((tmp_path / "hf_ext").glob("_native*"), None)
        return calls.read_text().count(" -c "), library.read_bytes() if library else None

    assert build(FAILS_AT="-shared") == (1, None)
    compiled, library = build()
    assert compiled == 1 and library
    assert build() == (0, library)
    header.write_text("#define NUMBER 2")
    compiled, other = build()
    assert compiled == 1 and other and other != library
    assert build(CFLAGS="-DDEFINED")[0] == 1
    header.write_text("#define NUMBER 1")
    assert build() == (0, library)


def test_the_error_is_one_of_ours_and_an_import_error() -> None:
    assert issubclass(MissingDependencyError, HfExtError) and issubclass(MissingDependencyError, ImportError)


@pytest.mark.skipif(sys.platform == "win32", reason="the compiler there keeps debug information in a file of its own")
def test_the_extension_carries_no_debug_information() -> None:
    (path,) = Path(hf_ext.__file__).parent.glob("_native*.so")
    assert path.stat().st_size < 4_000_000


# Without site-packages: NumPy needs a newer processor.
ROUND_TRIP = """
import array, importlib.util, random, sys, zlib

spec = importlib.util.spec_from_file_location("hf_ext._native", sys.argv[1])
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
random = random.Random(0)
base = array.array("f", (random.gauss(0, 0.02) for _ in range(20000)))
tensor = array.array("f", (value + random.gauss(0, 1e-4) for value in base))
for name in native.instruction_sets():
    native.use(name)
    body, out = native.encode(tensor, base, 1, 500, len(base)), bytearray(4 * len(tensor))
    native.decode(body, (out, base, 1, 500, len(base), 1))
    assert out == tensor.tobytes()
    print(name, zlib.crc32(body))
"""


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not shutil.which("qemu-x86_64"), reason="needs QEMU's user mode on x86-64"
)
def test_the_first_processors_of_x86_64_run_the_extension() -> None:
    (path,) = Path(hf_ext.__file__).parent.glob("_native*.so")
    command = [os.path.realpath(sys.executable), "-I", "-S", "-c", ROUND_TRIP, path]
    here, there = (
        subprocess.run([*emulated, *command], capture_output=True, text=True, timeout=100, check=True).stdout.split()
        for emulated in ([], ["qemu-x86_64", "-cpu", "qemu64"])
    )
    assert there[0] == "scalar" and len(there) == 2 and {*here[1::2]} == {there[1]}
