# `make demo` and `make test` do everything from a fresh clone; `make help` lists the targets.
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
# Compiled programs are kept between runs. XLA calls each program that it finds there one of another
# machine, because of two hints of its own compiler that are no features of any machine.
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.jax_cache
export TF_CPP_MIN_LOG_LEVEL ?= 3

# Tests start many processes, each of which imports the package: what Python compiled is kept as well.
unexport PYTHONDONTWRITEBYTECODE

# Two workers, each with whole files, so that a worker compiles a kernel once; small programs are
# kept as well, for the other worker and for the next time.
PYTEST = $(BIN)/python -m pytest -n 2 --dist loadfile
TESTING = check test test-slow test-experiments test-site doctest examples
$(TESTING): export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0
$(TESTING): export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES ?= -1

# These lanes compile quickly, and not well, which takes half the time. What the tests run, the slow
# lane runs compiled as users compile; the figures of the pages hold either way.
test test-experiments doctest: export JAX_DISABLE_MOST_OPTIMIZATIONS ?= 1

SWEPT = $(if $(STUDY),study=$(STUDY)) $(foreach word,$(SWEEP),'$(word)')

.PHONY: help setup demo deploy-demo check test test-slow test-experiments test-site doctest examples test-nvflare lint format type bench experiment run-distributed sweep-cpu sweep-gpu sweep-tpu docs docs-site dist clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | expand -t 18

setup: $(STAMP) ## create .venv and install the package with everything the targets need

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $(STAMP)

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $(DOCS_STAMP)

demo: $(STAMP) ## sample a real four-hospital trial and compare with pooled NUTS
	$(BIN)/python -m examples.demo $(ARGS)

deploy-demo: $(STAMP) ## the trial's hospitals as processes of their own, one of which is killed
	$(BIN)/python -m examples.deploy_demo $(ARGS)

check: lint type ## lint, types, and the tests that fail first: for every change, in a minute
	$(PYTEST) -m check tests $(ARGS)

test: $(STAMP) ## the fast lane of the tests; pages run in doctest
	$(PYTEST) -m "not slow and not data" tests --ignore tests/experiments --ignore tests/site --ignore tests/docs/test_pages.py $(ARGS)

test-experiments: $(STAMP) ## the fast lane of the experiments' tests
	$(PYTEST) -m "not slow and not data" tests/experiments $(ARGS)

test-slow: $(STAMP) ## every test, those of the fast lane too: all, or one folder: make test-slow PART=laws
	$(PYTEST) tests/$(PART) $(ARGS)

doctest: $(STAMP) ## the examples of docstrings, and of the pages in docs/ but for the slow ones
	$(PYTEST) --dist worksteal -m "not slow" --doctest-modules src tests/docs/test_pages.py --ignore src/fedmcmc/deploy/nvflare.py $(ARGS)

examples: $(STAMP) ## run the examples, two at a time
	$(PYTEST) --dist load tests/examples --durations 0 $(ARGS)

test-nvflare: ## sites over NVFlare, in an environment of its own
	test -x $(NVFLARE_VENV)/bin/python || $(PYTHON) -m venv $(NVFLARE_VENV)
	$(NVFLARE_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[nvflare,test]'
	$(NVFLARE_VENV)/bin/python -m pytest tests/deploy/test_nvflare.py $(ARGS)

test-site: docs-site ## the site's pages in a browser, where there is a Chromium
	$(BIN)/python -m pytest tests/site $(ARGS)

lint: $(STAMP) ## style, also of docstrings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## rewrite to the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: $(STAMP) ## static types
	$(BIN)/mypy

bench: $(STAMP) ## benchmarks, as ratios in one run
	$(BIN)/python -m benchmarks $(ARGS)

experiment: $(STAMP) ## run a study: make experiment STUDY=fsgld/gaussian_small
	$(BIN)/python -m experiments.run $(if $(STUDY),study=$(STUDY),$(RUN)) $(ARGS)

run-distributed: $(STAMP) ## one run in several processes: make run-distributed NPROC=2 RUN="data=... model=... kernel=..."
	$(BIN)/python -m experiments.launch -n $(NPROC) -m experiments.run $(RUN) $(ARGS)

sweep-cpu: $(STAMP) ## sweep: make sweep-cpu SWEEP="data=covtype model=logistic kernel=fsgld,dsgld seed=range(0,3)"
	JAX_PLATFORMS=cpu $(BIN)/python -m experiments.run --multirun $(SWEPT) $(ARGS)

sweep-gpu: $(STAMP) ## the same on a GPU (needs pip install '.[cuda12]')
	JAX_PLATFORMS=cuda $(BIN)/python -m experiments.run --multirun $(SWEPT) $(ARGS)

sweep-tpu: $(STAMP) ## the same on a TPU (needs pip install '.[tpu]')
	JAX_PLATFORMS=tpu $(BIN)/python -m experiments.run --multirun $(SWEPT) $(ARGS)

docs: $(STAMP) ## write docs/results and docs/results/findings.md from notes/ and records/
	$(BIN)/python -m experiments.render $(ARGS)

docs-site: $(DOCS_STAMP) ## build the documentation's site in build/site, without a network
	rm -rf build/site
	$(BIN)/python -m sphinx -q --fail-on-warning --keep-going -d build/doctrees -c docs . build/site $(SITE)

dist: $(STAMP) ## build sdist and wheel in dist
	$(BIN)/python -m hatchling build

clean: ## remove what the targets made
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .jax_cache build dist docs/api
