# `make demo` and `make test` are all a newcomer needs; both set up what they use.
VENV := .venv
PY := $(VENV)/bin/python
CLI := $(VENV)/bin/freetoken-agent
STAMP := $(VENV)/.installed
PIP := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test prove check bench docs clean

# torch first, by itself and pinned, so that a CPU build at hand is taken before anything asks for more.
$(STAMP): pyproject.toml constraints.txt
	test -x $(PY) || python3 -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[dev]'
	touch $@

demo: $(STAMP)
	$(CLI) pull smollm2
	$(CLI) demo

test: $(STAMP)
	$(CLI) pull smollm2
	$(PY) -m pytest -q

# Every proof, the long ones included, then the wheel in an environment of its own.
prove: $(STAMP)
	$(CLI) pull smollm2
	$(PY) -m pytest -q -m ''
	.ci/prove_wheel

check: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

bench: $(STAMP)
	$(CLI) pull smollm2
	$(CLI) bench all

# Pages that are made, not written. TEMPLATES: a folder of chat templates.
TEMPLATES ?= ../shared/templates
docs: $(STAMP)
	$(PY) docs/templates_table.py $(TEMPLATES) > docs/templates.md
	$(PY) -W ignore docs/families_table.py > docs/families.md
	$(PY) docs/reference_pages.py

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
