"""The C++ code under AddressSanitizer and UndefinedBehaviorSanitizer."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-pthread", "-std=c++17"]
CORE = sorted((ROOT / "csrc").glob("*/*.cpp"))
DRIVER = ["-g1", *CORE, ROOT / "tests" / "cpp" / "sanitize.cpp"]


def find_compiler(tmp_path: Path) -> str:
    """The first C++ compiler whose sanitizers work; the test is skipped where there is none."""
    source, program = tmp_path / "empty.cpp", tmp_path / "empty"
    source.write_text("int main() {}")
    for compiler in filter(None, map(shutil.which, ("c++", "g++", "clang++"))):
        compiled = subprocess.run([compiler, *SANITIZE, source, "-o", program], capture_output=True)
        if compiled.returncode == 0 and subprocess.run([program], capture_output=True).returncode == 0:
            return compiler
    pytest.skip("there is no C++ compiler with AddressSanitizer and UndefinedBehaviorSanitizer")


@pytest.mark.slow
def test_sanitizers_find_nothing_in_round_trips_and_damage(tmp_path: Path) -> None:
    compiler = find_compiler(tmp_path)
    subprocess.run([compiler, *SANITIZE, *DRIVER, "-o", tmp_path / "sanitize"], check=True)
    result = subprocess.run([tmp_path / "sanitize"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
