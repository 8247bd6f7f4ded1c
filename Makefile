# Everything runs in .venv, which is made on first use and again when the dependencies change.

# The first that really runs: a version manager may offer a python3.11 that is not installed.
PYTHON := $(shell for p in python3.11 python3; do $$p -c '' 2>/dev/null && command -v $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

PROMPT := Write a long novel about a lighthouse keeper who finds a map of a country that does not exist.

.PHONY: book setup test lint format clean

# A document of 1,000 tokens by the default preset, on any machine.
book: $(STAMP)
	$(BIN)/swiftgen write --tokens 1000 --force -o book.txt --prompt "$(PROMPT)"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	touch $@

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal # each test keeps to one core

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis book.txt book.swiftgen
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
