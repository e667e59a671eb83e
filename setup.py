"""Builds the C++ extension, copies model_cards/ into the package, names the repository. setup.cfg has all other settings."""

import glob
import hashlib
import os
import re
import shutil
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import check_output
from tempfile import TemporaryDirectory

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

SOURCES = sorted(glob.glob("csrc/**/*.cpp", recursive=True))
HEADERS = sorted(glob.glob("csrc/**/*.h", recursive=True))
# The files that are compiled as one, by their names. The other files are one more unit. Compiled one by one, they would spend a
# quarter of the time on headers that they share.
UNITS = [
    {"binding", "bits", "floats", "instruction_sets", "threads"},
    {"chunk", "choose_scales", "table_choice"},
    {"codec", "low_rank", "scales"},
    {"emr", "weighted_fit"},
]

# No flag names a processor: the code chooses its vector instructions at run time.
if sys.platform == "win32":
    COMPILE, LINK = ["/std:c++17", "/O2", "/EHsc", "/DNOMINMAX"], []
else:
    # Without -ffp-contract=off, some processors would fuse a product and a sum, which changes results. Without
    # -fno-trapping-math, gcc does not vectorize loops that compare floats.
    COMPILE = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-trapping-math", "-pthread", "-g0", "-fvisibility=hidden"]
    # With the debug information of Python's own flags, the file is seven times larger and takes a quarter longer to build.
    LINK = ["-pthread", "-Wl,-x" if sys.platform == "darwin" else "-Wl,--strip-all"]

# PiSSA, Trans-LoRA and Uni-Med work without the extension, so a failed build is only a warning. Builds that publish wheels set
# HF_EXT_REQUIRE_EXTENSION=1, which makes it an error.
REQUIRED = os.environ.get("HF_EXT_REQUIRE_EXTENSION", "0") not in ("", "0")
NOT_BUILT = """
*** The C++ extension of hf_ext was not built: {error}
*** FM-Delta and EMR-Merging will not work. To use them, install a C++17 compiler (Debian: apt-get install g++;
*** macOS: xcode-select --install) and repeat the installation.
"""


# The address of the repository, such as https://host/owner/name. The workflow that builds releases sets it; no file names it.
REPOSITORY = os.environ.get("HF_EXT_REPOSITORY")
LINK_TARGET = re.compile(r"(!?)(\[[^]]*\]\()(?!\w+:|#)")  # of a file in the repository


def about_repository() -> dict[str, object]:
    """Returns the metadata that name the repository: its URLs, and a README with its address and links to this version."""
    version = re.search(r'^__version__ = "(.+)"$', Path("hf_ext/__init__.py").read_text("utf-8"), re.M)[1]
    files, raw = (f"{REPOSITORY}/{view}/v{version}" for view in ("blob", "raw"))
    readme = LINK_TARGET.sub(lambda link: f"{link[0]}{raw if link[1] else files}/", Path("README.md").read_text("utf-8"))
    readme = re.sub(r" *# REPOSITORY: .*", "", readme).replace("REPOSITORY", REPOSITORY)
    urls = {"Source": REPOSITORY, "Changelog": f"{files}/CHANGELOG.md", "Security": f"{files}/SECURITY.md"}
    return {"long_description": readme, "project_urls": urls}


class BuildExtension(build_ext):
    """Compiles all units at the same time, or copies what an earlier build of the same files has left in build/native."""

    def build_extension(self, ext):
        library = Path(self.get_ext_fullpath(ext.name))
        try:
            if sys.platform == "win32":  # setuptools looks for MSVC in the first call of its compiler
                return super().build_extension(ext)
            self.force = True  # or setuptools prefers a newer library, which may have other flags
            kept = Path("build/native", self.fingerprint(), library.name)
            if kept.exists():
                self.mkpath(str(library.parent))
                self.copy_file(str(kept), str(library))
                return
            self.compile_at_once(ext)
            kept.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=kept.parent) as folder:  # a build that is killed here leaves no part of a library
                Path(shutil.copy2(library, folder)).replace(kept)
        except Exception as error:
            if REQUIRED:
                raise
            warn(NOT_BUILT.format(error=error))

    def fingerprint(self) -> str:
        """Returns a hash of what the library depends on: files, flags, compiler, platform and the version of Python."""
        compiler = {name: getattr(self.compiler, name) for name in self.compiler.executables}
        versions = [check_output([*compiler[name], "--version"]) for name in ("compiler_so", "compiler_cxx")]
        target = [sysconfig.get_platform(), sysconfig.get_config_var("SOABI"), os.environ.get("MACOSX_DEPLOYMENT_TARGET")]
        files = [(path, Path(path).read_bytes()) for path in SOURCES + HEADERS]
        return hashlib.sha256(repr([compiler, versions, target, COMPILE, LINK, self.units(), files]).encode()).hexdigest()[:16]

    def units(self) -> list[list[str]]:
        """Returns the files of each unit."""
        listed = [[path for path in SOURCES if Path(path).stem in names] for names in UNITS]
        others = [path for path in SOURCES if not any(Path(path).stem in names for names in UNITS)]
        return [unit for unit in [*listed, others] if unit]

    def compile_at_once(self, ext):
        compile_in_turn = self.compiler.compile

        def compile_units(_sources, **options):
            units = [Path(self.build_temp, f"unit_{number}.cpp") for number in range(len(self.units()))]
            for path, sources in zip(units, self.units()):
                path.write_text("".join(f'#include "{Path(source).absolute()}"\n' for source in sources))
            return [path for paths in pool.map(lambda unit: compile_in_turn([str(unit)], **options), units) for path in paths]

        self.compiler.compile = compile_units
        with TemporaryDirectory() as self.build_temp, ThreadPoolExecutor() as pool:
            super().build_extension(ext)


class BuildWithCards(build_py):
    """Copies the templates, which are at the top of the repository, into the installed package."""

    def run(self):
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "hf_ext", "model_cards")
            self.mkpath(str(target))
            for template in sorted(Path("model_cards").glob("*.md")):
                self.copy_file(str(template), str(target / template.name))


def warn(message: str) -> None:
    """Prints a message, also on the terminal: pip hides the output of a build that succeeds."""
    print(message, file=sys.stderr)
    if not sys.stderr.isatty():
        try:
            Path("/dev/tty").write_text(message)
        except OSError:  # there is no terminal
            pass


setup(
    **(about_repository() if REPOSITORY else {}),
    ext_modules=[
        Extension(
            "hf_ext._native",
            SOURCES,
            depends=HEADERS,
            language="c++",
            py_limited_api=True,
            extra_compile_args=COMPILE,
            extra_link_args=LINK,
            optional=not REQUIRED,
        )
    ],
    cmdclass={"build_ext": BuildExtension, "build_py": BuildWithCards},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
