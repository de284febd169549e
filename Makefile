# Each target sets up what it needs: a virtual environment, locked dependencies, this package.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# Python compiles what is imported and keeps that, and most of what is installed never is.
unexport PYTHONDONTWRITEBYTECODE
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --no-compile
# What pip says is shown if it fails.
quietly = $(1) >$(VENV)/pip.log 2>&1 || { cat $(VENV)/pip.log >&2; exit 1; }

.PHONY: demo study docs docs-serve test test-slow test-floor test-newest soak vectors audit dist torch lint format lock clean

demo: $(VENV)/ready  ## Seven algorithms on 100 clients with handwritten digits, a table and a report
	$(BIN)/fedda compare $(DEMO)

study: $(VENV)/ready  ## The study of reproduction/protocol.md, or continue it; SMALL=1 tries it in minutes
	$(BIN)/fedda study $(if $(SMALL),--small)

# Tests that share compiled programs are in one file, and so on one worker.
test: $(VENV)/ready  ## Everything but the slow tests
	$(BIN)/pytest -n auto --dist loadfile -m "not slow" $(TESTS)

test-slow: $(VENV)/ready
	$(BIN)/pytest -n auto --dist loadfile -m slow $(TESTS)

test-floor:  ## The numerical tests with the oldest supported JAX, in an environment of its own
	$(MAKE) VENV=.venv-floor LOCK=requirements-floor.lock .venv-floor/ready
	.venv-floor/bin/pytest -n auto -m "not slow" -W default \
	    tests/algorithms/test_oracles.py tests/algorithms/test_exactness.py \
	    tests/algorithms/test_contract.py tests/models/test_models.py \
	    tests/conformance/test_simulator.py tests/flower

# As a user's pip chooses them, so this fails when a release breaks something.
test-newest:  ## PyTorch modules and Flower with the newest releases of all that they need
	$(PYTHON) -m venv --clear .venv-newest
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
	    -e ".[flower,report,torch]" "flwr[simulation]" optax polars pytest pytest-xdist
	.venv-newest/bin/pytest -n auto -m "not slow" -W default tests/flower tests/pytorch \
	    tests/models/test_torch_modules.py tests/models/test_torch_errors.py \
	    tests/models/test_torch_algorithms.py
	.venv-newest/bin/pytest -m slow -W default tests/pytorch/test_example.py

# Kills, damaged files, full disks, hostile replies and more. The table says what failed.
soak: $(VENV)/ready  ## Thousands of disturbed runs, for MINUTES=30, with JOBS=2 processes
	PYTHONPATH=tests $(BIN)/python -m soak $(KINDS) --minutes $(or $(MINUTES),30) --jobs $(or $(JOBS),2) \
	    --out $(or $(OUT),tests/soak) $(if $(SEED),--seed $(SEED))

vectors: $(VENV)/ready  ## Write the test vectors again, from the references in NumPy
	$(BIN)/python -m conformance.generate

audit: $(VENV)/ready  ## Other libraries on the test vectors, in environments of their own
	$(BIN)/python -m conformance.audit $(LIBRARIES)

# The newest releases of what it needs, as a user's pip chooses them: a run, a comparison that names
# the extra it lacks, and a comparison with its report.
dist: $(VENV)/ready  ## Build wheel and sdist, and try the wheel in an environment of its own
	rm -rf dist
	$(BIN)/hatchling build -d dist
	$(PYTHON) -m venv --clear .venv-dist
	$(TRY) -m pip install --quiet --disable-pip-version-check --no-compile dist/fedda-*.whl
	$(TRY) -m pip check --disable-pip-version-check
	$(TRY) tools/try_installed.py
	$(TRY) -m pip install --quiet --disable-pip-version-check --no-compile "$$(echo dist/fedda-*.whl)[report]"
	$(TRY) tools/try_installed.py report
TRY = .venv-dist/bin/python

torch: $(VENV)/ready  ## PyTorch, which is too large for the lock; without it its tests skip
	$(call quietly,$(INSTALL) torch==2.13.0 torchax==0.0.13)

# MkDocs announces its successor at every build.
docs docs-serve: export NO_MKDOCS_2_WARNING = 1
docs: torch  ## The documentation, into site/; fails on a warning, and needs no network
	$(BIN)/mkdocs build --quiet

docs-serve: torch
	$(BIN)/mkdocs serve

lint: torch  ## Format, style, types (of the PyTorch client, too) and layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(VENV)/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Without pip's resolver: older versions of pip, that of Python 3.11 among them, refuse a pin of a
# package that is also asked for with extras once a newer release is out. What was installed is
# checked instead.
LOCK ?= requirements.lock
EXTRAS ?= dev report flower privacy
$(VENV)/ready: $(LOCK) pyproject.toml reproduction/pyproject.toml benchmarks/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11, 4) and "fedda needs Python 3.11.4 or newer; say make PYTHON=...")'
	@echo "Installing fedda and what it needs into $(VENV), which takes some minutes."
	@$(PYTHON) -m venv $(VENV)
	@$(call quietly,$(INSTALL) --no-deps --require-hashes -r $(LOCK))
	@$(call quietly,$(INSTALL) --no-deps --no-build-isolation -e . -e reproduction -e benchmarks)
	@$(BIN)/python tools/check_environment.py $(EXTRAS)
	@touch $@

lock: $(VENV)/ready  ## Resolve the newest versions anew, and the oldest that are supported
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet uv
	.venv-lock/bin/uv pip compile $(RESOLVE) -o requirements.lock
	.venv-lock/bin/uv pip compile $(RESOLVE) --resolution lowest-direct \
	    -o requirements-floor.lock

RESOLVE = pyproject.toml --extra dev --extra report --extra flower --extra privacy --universal \
    --python-version 3.11.4 --fork-strategy requires-python --generate-hashes --no-annotate \
    --no-header --quiet --upgrade

clean:
	rm -rf .venv .venv-floor .venv-lock .venv-dist .venv-newest .venv-audit build dist site
