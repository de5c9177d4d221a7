PYTHON ?= .venv/bin/python

.PHONY: check lint types test format

check: lint types test  ## everything CI runs

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types:
	$(PYTHON) -m mypy

test:
	$(PYTHON) -m pytest

format:
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
