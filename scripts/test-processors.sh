#!/usr/bin/env bash
# Runs `make test` as on other processors: PyTorch and oneDNN use older instruction sets, one or two threads, and the trainings of tests
# start from another seed (HF_EXT_TEST_SEED). Each value meets each value of the other settings, if AVX-512 with one thread is counted,
# which is what `make test` runs on a processor that has it. Settings that this processor lacks are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${VENV:-.venv}/bin/python
failed=() seed=0
while read -r aten onednn threads; do
    seed=$((seed + 1))
    settings="ATEN_CPU_CAPABILITY=$aten ONEDNN_MAX_CPU_ISA=$onednn OMP_NUM_THREADS=$threads HF_EXT_TEST_SEED=$seed"
    export ATEN_CPU_CAPABILITY=$aten ONEDNN_MAX_CPU_ISA=$onednn HF_EXT_TEST_SEED=$seed
    has=$("$python" -c 'import torch; print(torch.backends.cpu.get_cpu_capability().lower())')
    if [ "$has" != "$aten" ]; then
        echo "*** Skipped, as this processor lacks $aten: $settings"
        continue
    fi
    echo "*** $settings"
    workers=$(($(nproc) / threads))
    make test THREADS="$threads" WORKERS="$((workers > 0 ? workers : 1))" < /dev/null || failed+=("$settings")
done <<END
default SSE41 1
default AVX2 2
avx2 SSE41 2
avx2 AVX2 1
avx512 AVX2 2
END
[ ${#failed[@]} -eq 0 ] || { printf 'Failed: %s\n' "${failed[@]}"; exit 1; }
