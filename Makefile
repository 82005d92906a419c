# `make demo` and `make test` are all a newcomer needs; both set up what they use.
VENV := .venv
PY := $(VENV)/bin/python
CLI := $(VENV)/bin/freetoken-agent
STAMP := $(VENV)/.installed

.PHONY: demo test prove check bench docs clean

$(STAMP): pyproject.toml constraints.txt
	test -x $(PY) || python3 -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)
	$(CLI) pull smollm2
	$(CLI) demo

test: $(STAMP)
	$(CLI) pull smollm2
	$(PY) -m pytest -q

# Every proof, the slow ones included (about an hour on two cores).
prove: $(STAMP)
	$(CLI) pull smollm2
	$(PY) -m pytest -q -m ''

check: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

bench: $(STAMP)
	$(CLI) pull smollm2
	$(CLI) bench all

clean:
	rm -rf $(VENV) .demo .bench .mypy_cache .ruff_cache .pytest_cache .hypothesis
