# Every target says what it does: `make help`.
.DEFAULT_GOAL := help
.PHONY: help install test gpu lint format types imports check readme ci

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 12

install:  ## install the package in editable mode with everything for development, and the commit hooks
	pip install -e '.[dev]'
	pre-commit install

test:  ## run all tests that this machine can run; says which are skipped, and why
	pytest

gpu:  ## run only the tests that need an NVIDIA GPU
	pytest -m gpu

lint:  ## check style and formatting, change nothing
	ruff check .
	ruff format --check .

format:  ## repair what ruff can, and format
	ruff check --fix .
	ruff format .

types:  ## check types
	mypy

imports:  ## check that imports point down only
	lint-imports

check: lint types imports  ## lint, types and imports

readme:  ## fill the README's tables from docs/results
	python scripts/update_readme.py

ci:  ## what continuous integration runs: the README's test command in a new environment, then check
	.ci/run
