# The words of daily work. `make check` is what must be green before a commit.
PYTHON ?= python

.PHONY: check format lint types test cover bench docs

check: lint types test

format:
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

lint:
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .

types:
	$(PYTHON) -m mypy -p unicron_elastic

test:
	$(PYTHON) -m pytest

cover:
	$(PYTHON) -m pytest --cov --cov-report=term-missing:skip-covered

bench:
	$(PYTHON) benchmarks/restart.py
	$(PYTHON) benchmarks/in_band.py

# The site in build/site, from docs/ and what its pages link to. Needs the extra "docs".
docs:
	$(PYTHON) docs/tools/reference.py --check
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict
