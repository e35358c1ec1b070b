# Every target works on a fresh clone: the first one to run makes a virtual environment and installs into it, once.
# `make demo PYTHON=python3.13` picks another interpreter, which gets an environment of its own.
PYTHON ?= python3
VENV := .venv-$(notdir $(PYTHON))
BIN := $(VENV)/bin
# Processes that share the tests; each holds gigabytes of compiled functions.
WORKERS ?= 2
# NumPyro puts a distribution's fields into a set of names: in one order for all processes, they share what one has compiled.
ONE_ORDER := PYTHONHASHSEED=0
# Tests of one file share what they compile; tests/support/which_tests.py has the order of the files.
BY_FILE := --dist loadfile --no-loadscope-reorder
NOTEBOOKS = $(wildcard notebooks/*.py)

.PHONY: demo test test-slow models mutants bench bench-history bench-peers docs dist-check lint notebooks clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/ppl-gp demo --out demo_out

test: $(VENV)/.installed
	$(ONE_ORDER) $(BIN)/python -m pytest -n $(WORKERS) $(BY_FILE)

# Hours: a run that was cut goes on where it was, as long as no source has changed.
test-slow: $(VENV)/.installed
	$(ONE_ORDER) PPL_GP_TYPES=0 $(BIN)/python -m pytest -n $(WORKERS) $(BY_FILE) -m slow --resume

# Generated models, each with its rows permuted, doubled and cut: do a row's answers depend on other rows? Hours for 2000;
# a run that was cut goes on where it was. `make models MODELS=100 SEED=3` takes a hundred others.
MODELS ?= 2000
SEED ?= 0
models: $(VENV)/.installed
	PPL_GP_MODELS=$(MODELS) PPL_GP_SEED=$(SEED) $(ONE_ORDER) $(BIN)/python -m pytest -n $(WORKERS) -m slow --resume \
		-k "a_rows_answers" tests/properties/test_properties_random_slow.py

# Random edits of the package, one at a time, and whether `make test` would notice: hours for a hundred.
# What survives is printed; `make mutants MUTANTS=20 SEED=3` takes twenty others.
MUTANTS ?= 100
mutants: $(VENV)/.installed
	$(BIN)/python tests/mutants.py $(MUTANTS) --seed $(SEED)

bench: $(VENV)/.installed-bench
	$(BIN)/python -m tests.benchmarks.run
	$(BIN)/python -m tests.benchmarks.run sparse
	$(BIN)/python -m tests.benchmarks.run deep
	$(BIN)/python -m tests.benchmarks.run first

# Every number of every run that is on record, over time: benchmark_history.png.
bench-history: $(VENV)/.installed-bench
	$(BIN)/python -m tests.benchmarks.history

# The libraries that the sparse and deep benchmarks and the one of first answers compare with, each in an environment of its own.
bench-peers: $(foreach peer,gpflow gpytorch gpjax gpflux,.venv-$(peer)/.installed)

.venv-%/.installed: tests/benchmarks/peers/requirements-%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	touch $@

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python docs/tools/english.py

# The site, in site/: recipes are run, notebooks shown as they were executed; pages link only to what there is.
docs: $(VENV)/.installed-docs
	$(BIN)/python -m mkdocs build --strict --clean

# Builds the sdist, from it the wheel, and runs the first example of the site from the wheel in an empty environment.
dist-check: $(VENV)/.installed-dist
	rm -rf dist .venv-dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check dist/*.whl
	.venv-dist/bin/python -I tests/dist_check.py dist docs/index.md

notebooks: $(VENV)/.installed-notebooks
	$(BIN)/jupytext --to ipynb --execute $(NOTEBOOKS)

# Under pyenv the name python3.13 only runs where that version is selected: select it, if the plain name fails.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV) || PYENV_VERSION=$(patsubst python%,%,$(notdir $(PYTHON))) $(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[test,demo]"
	touch $@

$(VENV)/.installed-%: pyproject.toml | $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[$*]"
	touch $@

clean:
	rm -rf .venv-* .passed-* .jax_cache .pytest_cache .ruff_cache demo_out benchmark_history.png dist site .cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
