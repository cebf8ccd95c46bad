# Every target says what it does: `make help`.
.DEFAULT_GOAL := help
QUICK = tests/test_*.py tests/attention/masks tests/attention/dense/test_sdpa.py tests/records tests/data/test_packing.py tests/model/test_config.py
.PHONY: help install quick test test-all test-property test-compile gpu lint format types imports check docs readme ci

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 16

install:  ## install the package in editable mode with everything for development, and the commit hooks
	pip install -e '.[dev]'
	pre-commit install

quick:  ## run the tests of the rules and the small parts, in less than a minute
	pytest -n logical -m "not slow" $(QUICK)

test:  ## run the tests that take minutes, not more; says which are skipped, and why
	pytest

test-all:  ## run all tests that this machine can run, also the slow ones
	pytest --all

test-property:  ## random calls, masks, shared rows, steps of several ranks and kills, far more of each than `pytest --all` takes; hours
	python -m tests.support.attention.fuzz --draws 2000
	python -W ignore -m tests.support.attention.readers 300
	python -m tests.support.attention.shared_rows 4 100
	python -m tests.support.distributed.optimizer_steps 2 100
	python -m tests.support.distributed.optimizer_steps 4 100
	python -m tests.support.cli.kills --kills 60

test-compile:  ## compile every kernel with every shipped tile for every supported chip; no GPU needed, tens of minutes on many cores
	python -m tests.support.attention.compiled --all

gpu:  ## run only the tests that need an NVIDIA GPU
	pytest -m gpu

lint:  ## check style, formatting and the words of the text, change nothing
	ruff check .
	ruff format --check .
	python scripts/check_words.py

format:  ## repair what ruff can, and format
	ruff check --fix .
	ruff format .

types:  ## check types
	mypy

imports:  ## check that imports point down only
	lint-imports

check: lint types imports  ## lint, types and imports

docs:  ## show the documentation site, and build it again at every change
	mkdocs serve

readme:  ## fill the tables of the README and of docs/ from docs/results
	python scripts/update_readme.py

ci:  ## what continuous integration runs: all tests, checks, the site and a wheel in new environments, then short tests with the oldest PyTorch
	.ci/run
