# Every target sets up what it needs: a virtual environment in .venv with the versions of constraints.txt.

PYTHON ?= python3
# Test processes. Each uses one thread, so this is also the number of cores in use.
JOBS ?= 2
DEMO_OUT ?= outputs/demo
DEMO_ARGS ?=
APP_ARGS ?=
# Where the browser tests leave their pictures of the page.
SCREENSHOTS ?= $(CURDIR)/outputs/screenshots

VENV := .venv
VENV_OLDEST := .venv-oldest
READY := $(VENV)/.ready
READY_OLDEST := $(VENV_OLDEST)/.ready
PYTEST := -m pytest -n $(JOBS) --dist worksteal

.PHONY: help install demo app examples browser test lint format tables types pytest test-oldest build constraints clean distclean

help:
	@echo "make demo         generate one clip dense and sparse with the embedded model, into $(DEMO_OUT)"
	@echo "make app          the page that compares clips in a browser, at http://127.0.0.1:7860"
	@echo "make test         lint, types and all tests"
	@echo "make test-oldest  all tests on the oldest supported versions, in $(VENV_OLDEST)"
	@echo "make browser      Chromium for the tests of the page, where it is missing (as root on Debian or Ubuntu)"
	@echo "make lint | types | pytest | format | tables | examples | build | constraints | clean | distclean"

install: $(READY)

demo: $(READY)
	$(VENV)/bin/diffsieve compare --model mini-wan --method ba-att --min-tokens 0 --out $(DEMO_OUT) --overwrite $(DEMO_ARGS)
	@echo "Compare in a browser, with other prompts and settings: make app"
	@echo "A picture from the other model that ships: $(VENV)/bin/diffsieve generate --model mini-pixel-dit --prompt Flags --out outputs/flag"

app: $(READY)
	$(VENV)/bin/diffsieve app $(APP_ARGS)

# The finished runs that the page opens with; to be made anew when the embedded weights change.
examples: $(READY)
	$(VENV)/bin/python -m diffsieve.app.make_examples
	$(VENV)/bin/python -m tests.app.shoot docs/images/app.png

# The tests of the page need Chromium: without one they are skipped, and the closing list of skips says so. The one target
# that installs outside the checkout, so no other target calls it; .ci/run does.
browser:
	@test -n "$$CHROMIUM" || command -v chromium chromium-browser google-chrome >/dev/null || { \
	  test "$$(id -u)" = 0 && command -v apt-get >/dev/null && echo "Installing Chromium for the tests of the page" && \
	  { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium \
	    fonts-liberation; } >/dev/null 2>&1; } || echo "No Chromium found: the tests of the page will be skipped"

test: lint types pytest

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

tables: $(READY)
	$(VENV)/bin/python docs/write_tables.py

format: $(READY)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

types: $(READY)
	$(VENV)/bin/mypy diffsieve

pytest: $(READY)
	OMP_NUM_THREADS=1 DIFFSIEVE_SCREENSHOTS=$(SCREENSHOTS) $(VENV)/bin/python $(PYTEST)

test-oldest: $(READY_OLDEST)
	OMP_NUM_THREADS=1 $(VENV_OLDEST)/bin/python $(PYTEST)

build: $(READY)
	rm -rf build dist
	$(VENV)/bin/python -m build --no-isolation

# The versions in .venv become the tested ones.
constraints: $(READY)
	{ sed '/^[^#]/,$$d' constraints.txt; $(VENV)/bin/python -m pip freeze --all --exclude-editable | grep -v '^pip=='; } > constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

distclean: clean
	rm -rf $(VENV) $(VENV_OLDEST)

define set_up
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed, got {v[0]}.{v[1]}: make PYTHON=python3.12 ...")'
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check -c $(2) setuptools
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check -c $(2) --no-build-isolation -e '.[dev]'
	touch $(3)
endef

$(READY): pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (PyTorch is large: this takes some minutes the first time)"
	$(call set_up,$(VENV),constraints.txt,$@)

$(READY_OLDEST): pyproject.toml constraints-oldest.txt
	@echo "Installing the oldest supported versions into $(VENV_OLDEST)"
	$(call set_up,$(VENV_OLDEST),constraints-oldest.txt,$@)
