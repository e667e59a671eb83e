"""Builds the C++ extension, and takes model_cards/ into the package; everything else about it is in setup.cfg."""

import glob
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

MSVC = sys.platform == "win32"
SOURCES = [f"csrc/{name}.cpp" for name in ("binding", "codec", "decode", "emr", "encode")]
HEADERS = sorted(glob.glob("csrc/*.h"))
# Without the first -f some processors would round a product and a sum at once, and others twice; without the second no loop
# that compares floats becomes vector code.
GCC = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-trapping-math", "-pthread"]
NO_COMPILER = (
    "hf_ext needs a C++17 compiler to build its extension (on Debian: apt-get install g++; on macOS: xcode-select --install)."
)


class BuildCodec(build_ext):
    def build_extensions(self):
        if not MSVC and not any(shutil.which(name) for name in (self.compiler.compiler_cxx or ["c++"])[:1]):
            sys.exit(NO_COMPILER)
        super().build_extensions()


class BuildWithCards(build_py):
    """The templates stand at the top of the repository, and inside the package when it is installed."""

    def run(self):
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "hf_ext", "model_cards")
            self.mkpath(str(target))
            for template in sorted(Path("model_cards").glob("*.md")):
                self.copy_file(str(template), str(target / template.name))


setup(
    ext_modules=[
        Extension(
            "hf_ext._native",
            SOURCES,
            depends=HEADERS,
            language="c++",
            py_limited_api=True,
            extra_compile_args=["/std:c++17", "/O2", "/EHsc"] if MSVC else GCC,
            extra_link_args=[] if MSVC else ["-pthread"],
        )
    ],
    cmdclass={"build_ext": BuildCodec, "build_py": BuildWithCards},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
