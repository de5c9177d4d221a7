PYTHON ?= .venv/bin/python
export PYTHON

.PHONY: check lint types test format docs

check: lint types test  ## everything CI runs, in the environment that is there

lint:
	.ci/run lint

types:
	.ci/run types

test:
	$(PYTHON) -m pytest

format:
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

docs:  ## write the generated page
	$(PYTHON) -m cli.configuration_page > docs/configuration.md
