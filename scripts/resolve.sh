#!/usr/bin/env bash
# Resolves this package beside each stack, without installing. Leaves the versions in build/resolved. Requires uv.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p build/resolved
for stack in vllm==0.33.0 sglang==0.5.23 axolotl==0.19.0 axolotl==0.21.0 unsloth ms-swift llamafactory; do
    printf '%s\n.\n' $stack | uv pip compile --quiet --python-version 3.12 --python-platform x86_64-manylinux_2_34 \
        --output-file build/resolved/$stack.txt -
done
