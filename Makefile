# One verb per duty. `quickstart`, `test`, `slow` and `check` install first; when nothing changed that is a no-op.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS ?= train,eval,encode,app,dev
PYTEST_ARGS ?=
ARGS ?=

# Tests run in a process per core, at most four: each holds PyTorch, and up to 2 GB. `WORKERS=0` is one plain process.
# `worksteal` gives every process a stretch of files, so that fixtures are made once, and levels out at the end.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 1); echo $$((n < 4 ? n : 4)))
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# Beside a busy machine the workers of one process must not outnumber its cores.
export TOKENIZERS_PARALLELISM ?= false
export HF_HUB_DISABLE_TELEMETRY ?= 1

JOBS ?= $(shell nproc 2>/dev/null || echo 1)
KERNEL_SOURCES := $(shell find hub_kernels -type f -not -path '*/build/*' -not -name '*.pyc')

.PHONY: install kernels quickstart browser docs screenshot test slow test-gpu test-latest bench-gpu check format clean

install: $(VENV)/.installed $(VENV)/.kernels

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "moemb needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + "; call make PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -e ".[$(EXTRAS)]"
	@touch $@

# Exit status 3: something could not be staged (no compiler, a compile error) and was said; it is tried again next time.
$(VENV)/.kernels: $(VENV)/.installed $(KERNEL_SOURCES)
	@$(BIN)/python hub_kernels/tools/stage.py --install --jobs $(JOBS); status=$$?; \
	if [ $$status -eq 0 ]; then touch $@; elif [ $$status -ne 3 ]; then exit $$status; fi

kernels: $(VENV)/.installed
	$(BIN)/python hub_kernels/tools/stage.py --jobs $(JOBS)
	$(BIN)/python hub_kernels/tools/stage.py --install
	$(BIN)/python hub_kernels/tools/check.py
	$(BIN)/moemb kernels

quickstart: install
	$(BIN)/moemb quickstart $(ARGS)

# A Chromium for the tests of the web page; one that is there already is taken.
browser: $(VENV)/.browser

$(VENV)/.browser: $(VENV)/.installed tests/chromium.py
	$(BIN)/python tests/chromium.py && touch $@

docs: install
	$(BIN)/mkdocs build --strict $(ARGS)

# The picture of the search page in docs/how-to/search-a-folder.md.
screenshot: install browser
	MOEMB_SCREENSHOTS=build/screenshots $(BIN)/python -m pytest -q tests/trainers/test_app_browser.py -k words
	$(BIN)/python -c "from PIL import Image; Image.open('build/screenshots/words.png').convert('RGB').save('docs/assets/app.webp', quality=80, method=6)"

test: install browser
	$(PYTEST) $(PYTEST_ARGS)

slow: install browser
	$(PYTEST) -m slow $(PYTEST_ARGS)

test-gpu: install
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

# The newest transformers over the packages of $(VENV), in an environment of its own: only what differs is downloaded.
# pip remarks that moemb pins an older one: that is the point here.
LATEST := .venv-latest

test-latest: install
	test -x $(LATEST)/bin/python || $(PYTHON) -m venv $(LATEST)
	$(LATEST)/bin/python -c "import site, sysconfig, subprocess; \
	  outer = subprocess.check_output(['$(BIN)/python', '-c', 'import sysconfig; print(sysconfig.get_path(\"purelib\"))'], text=True).strip(); \
	  open(sysconfig.get_path('purelib') + '/outer.pth', 'w').write(f'import site; site.addsitedir({outer!r})\n')"
	$(LATEST)/bin/python -m pip install --disable-pip-version-check --upgrade "transformers<6" pytest
	$(LATEST)/bin/python -m pytest tests/modeling_moemb $(PYTEST_ARGS)

bench-gpu: install
	PATH="$(CURDIR)/$(BIN):$$PATH" bash hub_kernels/tools/bench_gpu.sh $(ARGS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache hub_kernels/*/build
