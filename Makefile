# Every target does its own set-up: a virtual environment in .venv with the versions of
# constraints.txt, made once and again when pyproject.toml or constraints.txt changes.
#
#   make demo       train a tiny model with FP8 reinforcement learning (minutes, no GPU)
#                   SETTINGS="loop.steps=10" changes settings
#   make test       the tests that need no GPU
#   make quick      structure, parity, precision and an installed wheel (two minutes)
#   make test-busy  the same with four busy loops beside them: no verdict may change
#   make soak       1000 steps with faults at random, runs killed at 60 moments, ranks that fail,
#                   and 10,000 damaged files of each kind (minutes)
#   make same-bits  whether a change left every bit as it was   BASE=COMMIT (minutes)
#   make check      format, lint, docstrings, budget of size and types
#   make house      measures of the sources next to their budget, calls to backward(), stops of opening a model
#   make format     what ruff can fix
#   make docs       the tables of docs/settings.md
#   make test-gpu   the tests that need a Hopper GPU   (GPU_PYTHON=... for another Python)
#   make bench      the benchmarks, on a GPU           (GPU_PYTHON=... for another Python)
#   make clean      remove the environment and the caches
#
# PYTHON chooses the interpreter of the environment (3.11 to 3.13): make test PYTHON=python3.12
# uv installs if it is on the PATH; it reads no pip.conf, and make UV= installs with pip.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
UV ?= $(shell command -v uv 2>/dev/null)
INSTALL := $(if $(UV),$(UV) pip install --quiet --python $(BIN)/python,\
  $(BIN)/python -m pip install --quiet --disable-pip-version-check) -c constraints.txt

# The GPU targets run from the sources, so a machine that has torch and pytest needs no .venv.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
TESTS ?= tests
SETTINGS ?=
BASE ?=
CASES ?=
TEST_WORKERS ?= 2
BUSY_LOOPS ?= 4
# Processes that share the GPU: three quarters of the cores, 12 at most.
GPU_TEST_WORKERS ?= $(shell n=$$(($$(nproc 2>/dev/null || echo 4) * 3 / 4)); \
  echo $$((n < 1 ? 1 : n > 12 ? 12 : n)))

.DEFAULT_GOAL := help
.PHONY: help demo test quick test-busy soak same-bits check house format docs test-gpu bench clean

help:
	@sed -n 's/^#   //p' Makefile

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "error: $(PYTHON) is not Python 3.11 to 3.13; name one: make PYTHON=python3.12" >&2; exit 1; }
	$(if $(UV),$(UV) venv --quiet --python $(PYTHON),$(PYTHON) -m venv) $(VENV) || { rm -rf $(VENV); exit 1; }

$(RUN_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing jetrl and what it needs into $(VENV) (once, a few minutes)"
	$(INSTALL) -e .
	@touch $@

$(DEV_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing jetrl, its extras and the development tools into $(VENV) (once, a few minutes)"
	$(INSTALL) -e '.[dev,data,reasoning-gym]'
	@touch $@ $(RUN_STAMP)

# A run's name is not used twice: the second demo is demo-2.
demo: $(RUN_STAMP)
	@name=demo; n=1; while [ -e runs/$$name ]; do n=$$((n + 1)); name=demo-$$n; done; \
	  set -x; $(BIN)/jetrl train demo run.name=$$name $(SETTINGS)

test: $(DEV_STAMP)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal $(TESTS)

# What tells soonest that a change, or another Python, breaks something.
quick: $(DEV_STAMP)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal \
	  tests/structure tests/parity tests/precision tests/tools/test_installation.py

test-busy: $(DEV_STAMP)
	tools/busy.sh $(BUSY_LOOPS) $(MAKE) test

# Each compares what it ends with, bit for bit, with a run that nobody disturbed.
soak: $(DEV_STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/reliability/kill_and_resume.py --kills 60
	OMP_NUM_THREADS=1 $(BIN)/python tests/reliability/fail_ranks.py
	OMP_NUM_THREADS=1 $(BIN)/python tests/reliability/soak.py --steps 1000
	JETRL_FUZZ_CASES=10000 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal \
	  tests/fuzz/test_stored_files.py

# Short runs on this tree and on BASE; CASES="demo ppo" runs only these.
same-bits: $(DEV_STAMP)
	@[ -n "$(BASE)" ] || { echo "name what to compare with: make same-bits BASE=COMMIT" >&2; exit 2; }
	$(BIN)/python tools/same_bits.py --base $(BASE) $(foreach case,$(CASES),--case $(case))

check: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/docstrings.py
	$(BIN)/python tools/house.py --check
	$(BIN)/mypy

house: $(RUN_STAMP)
	$(BIN)/python tools/house.py --hops
	$(BIN)/python tools/walk.py

format: $(DEV_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The tables that are made from the sources.
docs: $(RUN_STAMP)
	$(BIN)/python -m tools.documents docs

# Kernels are compiled on the way, in all workers at once; Triton's cache on disk is common to them.
# The device, versions, commit and result are printed and left in build/test-gpu.txt.
test-gpu:
	@$(GPU_PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || \
	  { echo "make test-gpu needs an NVIDIA Hopper GPU (H100, H200) and a torch built for CUDA;" >&2; \
	    echo "$(GPU_PYTHON) has not: run it there, or name another one with GPU_PYTHON=..." >&2; exit 1; }
	@workers='-n $(GPU_TEST_WORKERS) --dist worksteal'; \
	  $(GPU_PYTHON) -c 'import xdist' 2>/dev/null || { workers=; \
	    echo "pytest-xdist is not installed for $(GPU_PYTHON): the tests run in one process, which" \
	      "takes several times as long" >&2; }; \
	  set -x; PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON) -m pytest -m gpu tests/gpu $$workers

# Each writes JSON into build/bench; jetrl bench NAME runs one of them.
bench:
	@$(GPU_PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || \
	  { echo "make bench needs an NVIDIA Hopper GPU (H100, H200) and a torch built for CUDA;" >&2; \
	    echo "$(GPU_PYTHON) has not: run it there, or name another one with GPU_PYTHON=..." >&2; exit 1; }
	@for name in norm products attention layer rollout parity train step; do \
	  PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON) -m jetrl bench $$name --out build/bench/$$name.json || exit 1; done

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
