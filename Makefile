# Everything a checkout needs. `make` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV ?= .venv
# vLLM 0.32 runs on Python 3.11 to 3.14; the pins in requirements/ are those of 3.11.
SUPPORTED := import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
PYTHON ?= $(shell for p in python3.11 python3; do \
    "$$p" -c '$(SUPPORTED)' 2>/dev/null && { echo "$$p"; break; }; done)

# Nothing below may reach a model hub or report usage.
export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1

BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
INSTALL := $(BIN)/python requirements/install.py
PINS := $(wildcard requirements/*.txt)
# Words handed to pytest, as in: make test-quick ARGS="-k layers -x"
ARGS ?=

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

.PHONY: venv
venv: $(STAMPS)/vtaps ## create .venv with every pin of requirements/ and vtaps, editable

$(STAMPS)/created:
	@"$(PYTHON)" -c '$(SUPPORTED)' 2>/dev/null || { \
	    echo "error: vtaps needs Python 3.11 to 3.14 with its venv module (vLLM 0.32 runs on no other);" >&2; \
	    echo "       tried: $(if $(PYTHON),$(PYTHON),python3.11, python3). Name one: make PYTHON=/path/to/python3.11 venv" >&2; \
	    exit 1; }
	@echo "creating $(VENV) with $$("$(PYTHON)" -V)"
	@"$(PYTHON)" -m venv "$(VENV)"
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/requirements: $(STAMPS)/created $(PINS) requirements/install.py
	@rm -f $(VENV)/pip.log
	@$(INSTALL) requirements/torch.txt -c requirements/cpu.txt
	@$(INSTALL) requirements/cpu.txt --no-deps
	@$(INSTALL) requirements/vtaps.txt --no-deps
	@$(INSTALL) requirements/demo.txt --no-deps
	@$(INSTALL) requirements/dev.txt --no-deps
	@touch $@

$(STAMPS)/vtaps: $(STAMPS)/requirements pyproject.toml
	@echo "vtaps itself, editable"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-build-isolation -e .
	@touch $@

.PHONY: model
model: venv ## build the demo model once and link it as models/smollm2-135m-instruct
	@$(BIN)/python examples/demo_model.py

.PHONY: demo
demo: model ## run examples/paris.yaml on the demo model and print its table
	@$(BIN)/vtaps run examples/paris.yaml --out runs/demo-paris --overwrite

# Two processes, a file's tests in one of them; one that starts engines has a core of its own (tests/conftest.py).
# 5: nothing that ARGS asks for is there.
QUICK := -m "not engine and not gpu" -n 2
ENGINE := -m "engine and not gpu and not long" -n 2 --dist loadfile

.PHONY: test
test: model ## all quick and engine tests (real vLLM on the CPU)
	@status=0; \
	$(BIN)/python -m pytest $(QUICK) $(ARGS) || [ $$? -eq 5 ] || status=1; \
	VTAPS_TESTS=engine $(BIN)/python -m pytest $(ENGINE) --durations=25 $(ARGS) || [ $$? -eq 5 ] || status=1; \
	exit $$status

.PHONY: test-quick
test-quick: venv ## the tests that start no engine
	@$(BIN)/python -m pytest $(QUICK) $(ARGS)

.PHONY: test-engine
test-engine: model ## the tests that start engines
	@VTAPS_TESTS=engine $(BIN)/python -m pytest $(ENGINE) $(ARGS)

.PHONY: test-long
test-long: model ## the rest of the engine tests: every family on several workers (a quarter of an hour)
	@$(BIN)/python -m pytest -m "long and not gpu" $(ARGS)

.PHONY: soak
soak: venv ## 2,000 requests drawn at random on each engine, every row held against a forward of its own (10 minutes)
	@status=0; for mode in taps eager; do \
	    $(BIN)/python -m tests.engine.soak --mode $$mode $(ARGS) || status=1; done; exit $$status

.PHONY: fuzz
fuzz: venv ## 10,000 drawn specs and 1,000 with slips through check and compile (5 minutes); ARGS="--seed 1" for others
	@$(BIN)/python -m tests.spec.fuzz $(ARGS)

.PHONY: faults
faults: venv ## every call that changes a run folder fails, is cut short or is the process's last one (10 minutes)
	@VTAPS_EVERY_FAULT=1 $(BIN)/python -m pytest tests/results/test_faults.py -n 2 $(ARGS)

.PHONY: lint
lint: venv ## ruff: rules and layout
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

.PHONY: format
format: venv ## let ruff fix what it can
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

.PHONY: types
types: venv ## mypy, strict
	@$(BIN)/mypy
	@$(BIN)/mypy examples/demo_model.py requirements/install.py

.PHONY: check
check: lint types test ## lint, types and tests: what CI runs

.PHONY: examples-check
examples-check: model ## no block or lock in examples/ has drifted from its spec
	@status=0; for spec in examples/*.yaml; do \
	    echo "$$spec"; $(BIN)/vtaps compile --check "$$spec" || status=1; done; exit $$status

.PHONY: clean
clean: ## remove builds and caches (not .venv, models/ or runs/)
	@rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
