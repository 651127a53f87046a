# `make demo` and `make test` work in a fresh clone and install what they need. `make help` lists all
# targets.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
NVFLARE_VENV ?= .venv-nvflare
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
STUDY ?=
RUN ?= data=spherical model=logistic kernel=lsd_pp
SWEEP ?=
NPROC ?= 2
PART ?=
SITE ?=
ARGS ?=
# Keep compiled programs between runs. For each cached program, XLA prints that it was compiled for
# another machine, because of two compiler hints that are not features of any machine. The log level
# hides these messages.
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.jax_cache
export TF_CPP_MIN_LOG_LEVEL ?= 3

# Keep Python's bytecode, because tests start many processes that import the package.
unexport PYTHONDONTWRITEBYTECODE

# Two workers run whole files, so that each worker compiles a kernel only once. The cache also keeps
# small programs, for the other worker and for later runs.
PYTEST = $(BIN)/python -m pytest -n 2 --dist loadfile
TESTING = check test test-slow test-experiments test-site doctest examples
$(TESTING): export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0
$(TESTING): export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES ?= -1

# The fast tests compile without most optimizations, which halves their time. The slow tests compile
# as users do. The numbers on the pages hold in both cases.
test test-experiments doctest: export JAX_DISABLE_MOST_OPTIMIZATIONS ?= 1

SWEPT = $(if $(STUDY),study=$(STUDY)) $(foreach word,$(SWEEP),'$(word)')

.PHONY: help setup demo deploy-demo check test test-slow test-experiments test-site doctest examples test-nvflare lint format type bench experiment run-distributed sweep-cpu sweep-gpu sweep-tpu docs docs-site dist clean

help: ## list all targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | expand -t 18

setup: $(STAMP) ## create .venv and install the package with all test dependencies

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $(STAMP)

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $(DOCS_STAMP)

demo: $(STAMP) ## sample a trial in four hospitals and compare with pooled NUTS
	$(BIN)/python -m examples.demo $(ARGS)

deploy-demo: $(STAMP) ## run the trial's hospitals as separate processes, and kill one of them
	$(BIN)/python -m examples.deploy_demo $(ARGS)

check: lint type ## linter, types and the quickest tests: a minute, for every change
	$(PYTEST) -m check tests $(ARGS)

test: $(STAMP) ## fast tests of the package (experiments and pages have their own targets)
	$(PYTEST) -m "not slow and not data" tests --ignore tests/experiments --ignore tests/site --ignore tests/docs/test_pages.py $(ARGS)

test-experiments: $(STAMP) ## fast tests of the experiments
	$(PYTEST) -m "not slow and not data" tests/experiments $(ARGS)

test-slow: $(STAMP) ## all tests, slow and fast, or one folder: make test-slow PART=laws
	$(PYTEST) tests/$(PART) $(ARGS)

doctest: $(STAMP) ## run the examples in docstrings and pages, except slow pages
	$(PYTEST) --dist worksteal -m "not slow" --doctest-modules src tests/docs/test_pages.py --ignore src/fedmcmc/deploy/nvflare.py $(ARGS)

examples: $(STAMP) ## run the scripts in examples/, two at a time
	$(PYTEST) --dist load tests/examples --durations 0 $(ARGS)

test-nvflare: ## test sites over NVFlare, in a separate environment
	test -x $(NVFLARE_VENV)/bin/python || $(PYTHON) -m venv $(NVFLARE_VENV)
	$(NVFLARE_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[nvflare,test]'
	$(NVFLARE_VENV)/bin/python -m pytest tests/deploy/test_nvflare.py $(ARGS)

test-site: docs-site ## test the documentation site in a browser (needs Chromium)
	$(BIN)/python -m pytest tests/site $(ARGS)

lint: $(STAMP) ## check code and docstrings with ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## format code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: $(STAMP) ## check static types with mypy
	$(BIN)/mypy

bench: $(STAMP) ## run the benchmarks
	$(BIN)/python -m benchmarks $(ARGS)

experiment: $(STAMP) ## run a study of a paper: make experiment STUDY=fsgld/gaussian_small
	$(BIN)/python -m experiments.run $(if $(STUDY),study=$(STUDY),$(RUN)) $(ARGS)

run-distributed: $(STAMP) ## run in several processes: make run-distributed NPROC=2 RUN="data=... model=... kernel=..."
	$(BIN)/python -m experiments.launch -n $(NPROC) -m experiments.run $(RUN) $(ARGS)

sweep-cpu: $(STAMP) ## run a sweep: make sweep-cpu SWEEP="data=covtype model=logistic kernel=fsgld,dsgld seed=range(0,3)"
	JAX_PLATFORMS=cpu $(BIN)/python -m experiments.run --multirun $(SWEPT) $(ARGS)

sweep-gpu: $(STAMP) ## run a sweep on a GPU (needs pip install '.[cuda12]')
	JAX_PLATFORMS=cuda $(BIN)/python -m experiments.run --multirun $(SWEPT) $(ARGS)

sweep-tpu: $(STAMP) ## run a sweep on a TPU (needs pip install '.[tpu]')
	JAX_PLATFORMS=tpu $(BIN)/python -m experiments.run --multirun $(SWEPT) $(ARGS)

docs: $(STAMP) ## write the pages in docs/results from notes/ and records/
	$(BIN)/python -m experiments.render $(ARGS)

docs-site: $(DOCS_STAMP) ## build the documentation site in build/site, without a network
	rm -rf build/site
	$(BIN)/python -m sphinx -q --fail-on-warning --keep-going -d build/doctrees -c docs . build/site $(SITE)

dist: $(STAMP) ## build the sdist and the wheel in dist/
	$(BIN)/python -m hatchling build

clean: ## remove environments, caches and built files
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .jax_cache build dist docs/api
