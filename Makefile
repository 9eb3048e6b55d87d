# One verb per duty. `quickstart`, `test`, `slow` and `check` install first; when nothing changed that is a no-op.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS ?= train,eval,app,dev
PYTEST_ARGS ?=
ARGS ?=

# Beside a busy machine the workers of one process must not outnumber its cores.
export TOKENIZERS_PARALLELISM ?= false
export HF_HUB_DISABLE_TELEMETRY ?= 1

.PHONY: install quickstart test slow test-gpu check format clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "moemb needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + "; call make PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -e ".[$(EXTRAS)]"
	@touch $@

quickstart: install
	$(BIN)/moemb quickstart $(ARGS)

test: install
	$(BIN)/python -m pytest $(PYTEST_ARGS)

slow: install
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

test-gpu: install
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache
