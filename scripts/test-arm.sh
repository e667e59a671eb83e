#!/usr/bin/env bash
# Cross compiles the C++ code for 64-bit ARM and emulates that: what either processor encodes, both must decode alike, with NEON and
# without. It takes minutes; tests/storage/test_arm.py is shorter.
set -euo pipefail
cd "$(dirname "$0")/.."
cxx=${ARM_CXX:-aarch64-linux-gnu-g++} run=${ARM_RUN:-qemu-aarch64}
if ! command -v "$cxx" "$run" > /dev/null || [ "$(command -v "$cxx" "$run" | wc -l)" -ne 2 ]; then
    echo "make test-arm needs a cross compiler and QEMU (on Debian: apt-get install g++-aarch64-linux-gnu qemu-user)"
    exit 1
fi
flags="-std=c++17 -O3 -ffp-contract=off -fno-trapping-math -pthread"
rm -rf build/arm && mkdir -p build/arm/made/here build/arm/made/there

# Each source becomes an object; those of the ARM compiler are shared by two programs.
compile() { # COMPILER FOLDER
    mkdir -p "$2"
    printf '%s\n' csrc/*/*.cpp | xargs -P "$(nproc)" -I FILE sh -c "$1 $flags -c FILE -o $2/\$(echo FILE | tr / _).o"
}
compile "${CXX:-g++}" build/arm/here
compile "$cxx" build/arm/there
${CXX:-g++} $flags -O1 build/arm/here/*.o tests/fuzz/decode.cpp tests/cpp/bodies.cpp -o build/arm/bodies
for program in bodies sanitize; do
    "$cxx" $flags -O1 -static build/arm/there/*.o tests/fuzz/decode.cpp tests/cpp/$program.cpp -o build/arm/$program-arm
done

build/arm/bodies make build/arm/made/here
"$run" build/arm/bodies-arm make build/arm/made/there
build/arm/bodies decode build/arm/made/*/* tests/fuzz/seeds/* > build/arm/here.txt
"$run" build/arm/bodies-arm decode build/arm/made/*/* tests/fuzz/seeds/* > build/arm/there.txt
cmp build/arm/here.txt build/arm/there.txt
"$run" build/arm/sanitize-arm
