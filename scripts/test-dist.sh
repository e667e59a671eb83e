#!/usr/bin/env bash
# Installs the wheel or the sdist of dist/ in an environment of its own, the wheel without a compiler, and runs the tests of the
# extension with it.
#
#   scripts/test-dist.sh wheel
#   scripts/test-dist.sh sdist
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$PWD/.venv-test-$1 constraints=$PWD/${CONSTRAINTS:-constraints.txt}
rm -rf "$venv" "build/test-$1"
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" install --quiet --constraint "$constraints" torch
path=$PATH
[ "$1" = sdist ] || path=$venv/bin
file=$(test "$1" = sdist && echo dist/*.tar.gz || echo dist/*.whl)
HF_EXT_REQUIRE_EXTENSION=1 PATH=$path "$venv/bin/pip" install --quiet --constraint "$constraints" "$file" pytest hypothesis
# The tests are copied to a folder without the package, so that they import the installed one.
mkdir -p "build/test-$1"
cp -r setup.cfg tests "build/test-$1"
cd "build/test-$1"
PYTHONPATH='' OMP_NUM_THREADS=1 PATH=$path "$venv/bin/pytest" @tests/of_the_extension.txt
