# Twofold. `make` or `make help` lists what there is. Every target sets itself up: the first one to run makes .venv, installs and
# compiles, and says how far it is; later ones compile only what changed.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

export TWOFOLD_VENV ?= $(CURDIR)/.venv
# In quotes wherever a recipe names it: the folder's name may hold a space.
BIN := $(TWOFOLD_VENV)/bin
CPP_FILES = $(shell git ls-files -co --exclude-standard '*.cpp' '*.h' '*.cu' '*.cuh')
SHELL_FILES = $(shell git ls-files -co --exclude-standard '*.sh') .ci/run

# What `make run`, `make loadtest` and `make bench` can be told, e.g. make run PORT=8000 MODEL=~/models/Qwen3-30B-A3B
PORT ?= 10002
DASHBOARD_PORT ?= 8501
MODEL ?=
# Of a command that takes a model or none: in quotes, and with ~ expanded, which not every shell does after MODEL=.
MODEL_ARGUMENT = $(if $(MODEL),"$(MODEL:~/%=$(HOME)/%)")
ACCELERATOR ?=
RATIO ?=
USERS ?= 10
SECONDS_OF_LOAD ?= 60
# Further options of `make loadtest`, e.g. LOADTEST_ARGS='--shape ramp --slo ttft_p95_ms=500'
LOADTEST_ARGS ?=
LOCUST_PORT ?= 8089
# What `make build` installs: dev or run.
PROFILE ?= dev
# What `make test` can be told, e.g. make test PYTEST_ARGS='-x tests/cli'. Two processes run the tests; 0: this one does.
PYTEST_ARGS ?=
TEST_PROCESSES ?= 2

# What `make test-levels` runs again at each lesser level of the CPU's kernels.
MODEL_TESTS = tests/blocks tests/core tests/device tests/engine tests/experts tests/models tests/parallel tests/step \
  tests/vision/test_pictures.py tests/vision/test_bidirectional_pictures.py tests/weights
AVX2_TESTS ?= $(MODEL_TESTS) tests/native tests/kernels
GENERIC_TESTS ?= $(MODEL_TESTS)
# torch and its libraries round by the CPU's level, too: held to what such a CPU has.
TORCH_avx2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
TORCH_generic := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41

.PHONY: help run screenshots test test-levels test-slow check-cuda test-gpu sanitize-gpu bench-gpu gpu-day gpu-wheels build quick-build lint docs fmt bench loadtest loadtest-ui doctor clean usable-ports ready-run ready-dev

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'
	@echo
	@echo "  make run takes PORT=$(PORT) DASHBOARD_PORT=$(DASHBOARD_PORT) MODEL=dir ACCELERATOR=auto|cuda|none|emulated:NAME RATIO=0.0-1.0"

run: usable-ports ready-run  ## start the OpenAI server and the dashboard; Ctrl-C ends both
	@exec "$(BIN)"/python -m scripts.run_stack --port="$(PORT)" --dashboard-port="$(DASHBOARD_PORT)" \
	  --model="$(MODEL)" --accelerator="$(ACCELERATOR)" --ratio="$(RATIO)"

# Not --dist loadfile or loadscope: in pytest-xdist 3.8 a run with them hangs after a worker has crashed (its issues 1323, 1327).
PYTEST = TWOFOLD_TESTS_NEED_ALL=1 OMP_NUM_THREADS=1 "$(BIN)"/python -m pytest -n $(TEST_PROCESSES) --dist worksteal -m "not slow"
LESSER_LEVELS = from twofold._testing import kernels; from twofold.blocks import ops; \
  print("", *(level for level in kernels.supported_levels() if level != ops.isa_choice()[0]), "")
# $(1): a level, $(2): its tests. A level that the CPU lacks, or that `make test` ran, is left out.
test_at = if [[ "$$lesser" == *" $(1) "* ]]; then echo "at TWOFOLD_ISA=$(1):"; TWOFOLD_ISA=$(1) $(TORCH_$(1)) $(PYTEST) $(2) $(PYTEST_ARGS); \
  else echo "at TWOFOLD_ISA=$(1): nothing to add on this CPU"; fi

test: ready-dev  ## run every test that takes less than ten seconds
	@$(PYTEST) $(PYTEST_ARGS)

test-levels: ready-dev  ## run the tests of AVX2_TESTS and GENERIC_TESTS again with lesser kernels than this CPU's best
	@lesser=$$("$(BIN)"/python -c '$(LESSER_LEVELS)'); \
	$(call test_at,avx2,$(AVX2_TESTS)); \
	$(call test_at,generic,$(GENERIC_TESTS))

test-slow: ready-dev  ## run the long tests
	@TWOFOLD_TESTS_NEED_ALL=1 "$(BIN)"/python -m pytest -m "slow" $(PYTEST_ARGS)

build:  ## install and compile from the ground up, logged and timed (PROFILE=run: only what serving needs)
	@scripts/initial_build.sh $(PROFILE)

quick-build:  ## compile what changed
	@scripts/quick_build.sh

lint: ready-dev  ## check style and types of every language in the repository
	@"$(BIN)"/ruff check .
	@"$(BIN)"/ruff format --check .
	@"$(BIN)"/mypy
	@PYTHONPATH=engine:. "$(BIN)"/lint-imports --no-cache --no-logo
	@"$(BIN)"/clang-format --dry-run -Werror $(CPP_FILES)
	@PATH="$(BIN):$$PATH" shellcheck -x $(SHELL_FILES)
	@"$(BIN)"/hadolint .devcontainer/Dockerfile deploy/container/Dockerfile
	@"$(BIN)"/check-jsonschema -q --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@"$(BIN)"/check-jsonschema -q --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/{bug,feature}.yml
	@"$(BIN)"/check-jsonschema -q --builtin-schema vendor.citation-file-format CITATION.cff
	@"$(BIN)"/python scripts/check_words.py

docs: ready-dev  ## build the documentation as a site in build/site; fails on a broken link
	@NO_MKDOCS_2_WARNING=1 "$(BIN)"/mkdocs build --quiet

fmt: ready-dev  ## format Python and C++
	@"$(BIN)"/ruff check --fix-only --quiet .
	@"$(BIN)"/ruff format .
	@"$(BIN)"/clang-format -i $(CPP_FILES)

bench: ready-dev  ## measure the CPU kernels beside the read ceiling, then the bundled model (or MODEL=dir)
	@"$(BIN)"/python kernels/bench/run.py
	@"$(BIN)"/twofold bench $(MODEL_ARGUMENT) --compare-transformers

loadtest: ready-run  ## let USERS=10 chat for SECONDS_OF_LOAD=60 with a server that `make run` started
	@"$(BIN)"/twofold loadtest --users $(USERS) --seconds $(SECONDS_OF_LOAD) --host http://127.0.0.1:$(PORT) $(LOADTEST_ARGS)

loadtest-ui: ready-run  ## the same with Locust's web page on 127.0.0.1:8089, where the load is chosen
	@"$(BIN)"/twofold loadtest --ui --ui-port $(LOCUST_PORT) --host http://127.0.0.1:$(PORT)

screenshots: ready-dev  ## renew the pictures of chat page and dashboard in docs/images (needs Chromium)
	@"$(BIN)"/python -m scripts.renew_screenshots --seconds $(SECONDS_OF_LOAD)

check-cuda: ready-dev  ## compile the CUDA kernels for every architecture; fails where one got worse (no GPU; WRITE=1 keeps it)
	@"$(BIN)"/python scripts/check_cuda.py $(if $(WRITE),--write)
	@"$(BIN)"/python -m benchmarks.gpu.estimate

# No virtual environment for these: a GPU machine's own python brings the torch that fits its driver. FOLDER: where the report
# goes, MINUTES: for the build too, WHEELS: what `make gpu-wheels` collected, ONLY='name; part': a part of the day.
GPU_DAY = $${PYTHON:-python3} -m tests.gpu.day $(if $(MINUTES),--minutes $(MINUTES)) $(if $(FOLDER),--folder "$(FOLDER)") \
  $(if $(WHEELS),--wheels "$(WHEELS)")

gpu-day:  ## check and measure on a GPU, what decides first, within MINUTES=9; the report goes to build/gpu-day
	@$(GPU_DAY) $(if $(ONLY),--only "$(ONLY)")

test-gpu:  ## the part of that which checks numbers
	@$(GPU_DAY) --only numbers

bench-gpu:  ## the part of that which measures speed
	@$(GPU_DAY) --only figures

sanitize-gpu:  ## the part of that which runs under compute-sanitizer
	@$(GPU_DAY) --only sanitizer

gpu-wheels: ready-dev  ## collect what `serve` needs on a GPU machine without network, for WHEELS=build/gpu-wheels
	@"$(BIN)"/python -m tests.gpu.packages "$(or $(FOLDER),build/gpu-wheels)"

doctor: ready-run  ## say what this machine has, lacks and can run
	@"$(BIN)"/twofold doctor $(MODEL_ARGUMENT)

clean:  ## remove what was built; .venv stays (rm -rf .venv removes that too)
	@rm -rf $(if $(TWOFOLD_BUILD_DIR),$(addprefix "$(TWOFOLD_BUILD_DIR)"/,dev gpu gpu-day gpu-models gpu-wheels logs),build) dist .mypy_cache .ruff_cache \
	  .pytest_cache .hypothesis
	@find engine dashboard loadtest benchmarks models scripts tests -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# Before set-up, which takes minutes; a machine without python3 learns that from set-up itself.
usable-ports:
	@! command -v python3 >/dev/null || python3 scripts/ports.py --port="$(PORT)" --dashboard-port="$(DASHBOARD_PORT)"

ready-run:
	@scripts/ensure_built.sh run

ready-dev:
	@scripts/ensure_built.sh dev
