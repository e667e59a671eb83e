#!/usr/bin/env bash
# Trains the models in pairs/ and lm/, and runs most benchmarks whose figures the pages of docs/ show. DATA and BBH are folders: see
# benchmarks/fine_tunes.py and benchmarks/emr_generation.py.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ ! -d "${DATA:-}" ] || [ ! -d "${BBH:-}" ]; then
    echo "make bench needs DATA=folder and BBH=folder; see benchmarks/fine_tunes.py and benchmarks/emr_generation.py"
    exit 1
fi
python=${VENV:-.venv}/bin/python
"$python" benchmarks/fine_tunes.py --data "$DATA" --out pairs --tasks trec --save_steps 34
"$python" benchmarks/fine_tunes.py --data "$DATA" --out pairs
"$python" benchmarks/language_model.py --data "$DATA" --out lm
"$python" benchmarks/fm_delta.py --pairs pairs --lm lm --plot pairs/fm_delta.png
"$python" benchmarks/commands.py lm/base lm/full lm/lora
"$python" benchmarks/commands.py lm/base lm/lora lm/full
"$python" benchmarks/weight_sync.py --lm lm
"$python" benchmarks/emr.py --pairs pairs --data "$DATA" --test 500
"$python" benchmarks/emr_generation.py --lm lm --data "$DATA" --bbh "$BBH" --out generation generation-1 --test 300 --bf16
"$python" benchmarks/attacks.py
"$python" benchmarks/pissa.py
"$python" benchmarks/pissa_training.py --data "$DATA" --lm lm --out pissa-runs
"$python" benchmarks/uni_med.py
"$python" benchmarks/extract_lora.py --base lm/base --data "$DATA" --generation generation --bbh "$BBH"
