"""The C++ codec on 64-bit ARM, cross compiled and emulated. `make test-arm` compares more, in minutes."""

import shutil
import subprocess
from pathlib import Path

import pytest
from test_fuzz import SEEDS, outcomes

ROOT = Path(__file__).parents[2]
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-pthread", "-static"]
SOURCES = [
    *ROOT.glob("csrc/common/*.cpp"),
    *ROOT.glob("csrc/delta/*.cpp"),
    ROOT / "tests/cpp/bodies.cpp",
    ROOT / "tests/fuzz/decode.cpp",
]


def fnv1a(data: bytes) -> int:
    result = 0xCBF29CE484222325
    for byte in data:
        result = (result ^ byte) * 0x100000001B3 % 2**64
    return result


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason=f"needs {COMPILER} and {EMULATOR}")
def test_an_arm_processor_decodes_the_same_as_this_one(tmp_path: Path) -> None:
    subprocess.run([COMPILER, *FLAGS, *SOURCES, "-o", tmp_path / "bodies"], check=True)
    command = [EMULATOR, tmp_path / "bodies", "decode", *SEEDS]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert printed == [f"{fnv1a(outcomes(path.read_bytes())[0]):016x} {path}" for path in SEEDS]
