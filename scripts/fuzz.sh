#!/usr/bin/env bash
# Looks for damaged bodies that harm the decoder, or that two instruction sets decode differently, for FUZZ_SECONDS (600 by default).
# What libFuzzer learns stays in build/fuzz/corpus. A file that it leaves in build/fuzz is a finding: fix the code and move the file to
# tests/storage/crashes.
set -euo pipefail
cd "$(dirname "$0")/.."
clang=${CLANG:-clang++}
flags="-std=c++17 -g -O1 -pthread -ffp-contract=off -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all"
mkdir -p build/fuzz/corpus
if [ ! -e build/fuzz/decode ] || [ -n "$(find csrc tests/fuzz -name '*.[ch]*' -newer build/fuzz/decode)" ]; then
    command -v "$clang" > /dev/null || { echo "make fuzz needs clang (on Debian: apt-get install clang)"; exit 1; }
    echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, long) { return 0; }' | "$clang" $flags -x c++ - -o /dev/null 2> /dev/null \
        || { echo "$clang lacks libFuzzer or its sanitizers (on Debian: apt-get install libclang-rt-14-dev, for clang 14)"; exit 1; }
    "$clang" $flags csrc/*/*.cpp tests/fuzz/*.cpp -o build/fuzz/decode
fi
build/fuzz/decode -max_total_time="${FUZZ_SECONDS:-600}" -timeout=10 -rss_limit_mb=2048 -malloc_limit_mb=256 \
    -artifact_prefix=build/fuzz/ build/fuzz/corpus tests/fuzz/seeds
