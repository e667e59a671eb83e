#!/usr/bin/env bash
# Runs PEFT's own tests with PissaConfig in place of LoraConfig, and lists what PiSSA refuses and why (tests/with_peft).
# The source distribution of PEFT contains its tests, except for the file that makes them a package. Most models come from the Hub.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD bin=$PWD/.venv-peft/bin
test -d .venv-peft || "${PYTHON:-python3}" -m venv .venv-peft
"$bin/pip" install --quiet --constraint constraints.txt torch setuptools
"$bin/pip" install --quiet --constraint constraints.txt --no-build-isolation --editable '.[quantization]' \
    pytest pytest-xdist attrs datasets diffusers parameterized scikit-learn scipy
rm -rf build/peft && mkdir -p build/peft
"$bin/pip" download --quiet --no-deps --no-build-isolation --no-binary peft --dest build/peft --constraint constraints.txt peft
tar --extract --file build/peft/*.tar.gz --strip-components 1 --directory build/peft && touch build/peft/tests/__init__.py
cd build/peft
# shellcheck disable=SC2086  # TESTS is a list
HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} OMP_NUM_THREADS=1 PYTHONPATH=$root/tests/with_peft "$bin/python" -m pytest -p pissa_for_lora \
    -c /dev/null --rootdir . --numprocesses auto -W ignore --tb line --quiet ${TESTS:-tests}
