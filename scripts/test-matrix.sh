#!/usr/bin/env bash
# Runs all tests with sets of versions, each in an environment of its own (.venv-COLUMN), then prints a table of what
# passes. A column that fails does not end the run, but the exit code is then 1.
#
#   scripts/test-matrix.sh                                    # all columns
#   TESTS="tests/test_cli.py tests/emr" scripts/test-matrix.sh oldest newest
#
# The columns are the files of constraints/; `newest`, the newest version of every package that hf_ext plugs into (it changes with the
# day); and `storage`, without Transformers and PEFT, where test modules that need these cannot be imported and count as absent.
set -euo pipefail
cd "$(dirname "$0")/.."
hosts='diffusers|transformers|tokenizers|peft|accelerate|huggingface_hub|torch|setuptools'
mkdir -p build/matrix

storage() {
    test -d .venv-storage || "${PYTHON:-python3}" -m venv .venv-storage
    .venv-storage/bin/pip install --quiet setuptools -r constraints/storage.txt --constraint constraints.txt
    .venv-storage/bin/pip install --quiet --no-deps --no-build-isolation --editable .
    # shellcheck disable=SC2086  # TESTS is a list
    OMP_NUM_THREADS=1 .venv-storage/bin/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder \
        --continue-on-collection-errors --junitxml build/matrix/storage.xml ${TESTS:-}
}

column() {
    if [ "$1" = storage ]; then
        storage
        return
    fi
    constraints=build/constraints-$1.txt
    if [ "$1" = newest ]; then
        grep -vE "^($hosts)==" constraints.txt > "$constraints"
    else
        named=$(sed -n 's/==.*//p' "constraints/$1.txt" | paste -sd '|')
        grep -vE "^(tokenizers|$named)==" constraints.txt | cat - "constraints/$1.txt" > "$constraints"
    fi
    make test-all VENV=".venv-$1" CONSTRAINTS="$constraints" UPGRADE='--upgrade --upgrade-strategy eager' REPORT="build/matrix/$1.xml"
}

failed=()
for name in ${@:-newest vllm-hosts axolotl oldest llamafactory storage}; do
    (column "$name") || failed+=("$name")
done
"${PYTHON:-python3}" scripts/matrix_table.py build/matrix
[ ${#failed[@]} -eq 0 ] || { echo "Failed: ${failed[*]}"; exit 1; }
