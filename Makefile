# Headrace: how it is built, checked and tested. `make help` lists the targets.
#
# build   .venv with the package (editable) and the release engine beside its scripts. Build output goes to a
#         cache outside the checkout where that can be made, so that a second checkout builds in seconds.
# check   formats, lints, types, who imports whom. Minutes when nothing is built yet.
# test    check, then all tests but the long ones. Under CI=true nothing may be skipped.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV := .venv
CACHE := $(shell d="$${XDG_CACHE_HOME:-$$HOME/.cache}/headrace"; mkdir -p "$$d/target" 2>/dev/null && test -w "$$d/target" && echo "$$d" || echo "$(CURDIR)/target/cache")
export CARGO_TARGET_DIR ?= $(patsubst $(CURDIR)/target/cache/target,$(CURDIR)/target,$(CACHE)/target)
# Where the tests find torch: made when missing (4 GB), only under CI=true or `make torch`.
export HEADRACE_TORCH_VENV ?= $(if $(CI),$(CACHE)/torch-venv)
PIP := $(VENV)/bin/python -m pip --quiet --disable-pip-version-check --no-input
CARGO_FLAGS := --locked --workspace
PYTEST_ARGS ?=

.PHONY: help build engine check test test-rust test-python test-long torch demo fuse wheel clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

build: $(VENV)/.installed engine ## .venv with the package and the release engine

$(VENV)/.installed: requirements/dev.txt pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "headrace needs Python 3.11 or later; $(PYTHON) is " + sys.version.split()[0] + ": name another with make PYTHON=...")'
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@echo "installing Python packages into $(VENV)"
	@$(PIP) install -r requirements/dev.txt
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

# The engine is put in place by rename: one that runs keeps its own file.
engine: $(VENV)/.installed
	@cargo build --release --locked --package headraced 2> >(grep --line-buffered -vE '^ +Finished' >&2 || true)
	@cmp --silent "$$CARGO_TARGET_DIR/release/headraced" $(VENV)/bin/headraced || \
	  { cp "$$CARGO_TARGET_DIR/release/headraced" $(VENV)/bin/.headraced.new && mv -f $(VENV)/bin/.headraced.new $(VENV)/bin/headraced; }

check: $(VENV)/.installed ## formats, lints, types, who imports whom
	cargo fmt --all --check
	cargo clippy $(CARGO_FLAGS) --all-targets --quiet -- -D warnings
	$(VENV)/bin/ruff check --quiet
	$(VENV)/bin/ruff format --quiet --check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports pyproject.toml > $(VENV)/lint-imports.txt || { cat $(VENV)/lint-imports.txt; exit 1; }
	$(VENV)/bin/pytest -q tests/architecture

test: check build test-rust test-python ## check, then all tests but the long ones

test-rust:
	cargo test $(CARGO_FLAGS) --quiet

test-python: build $(if $(CI),torch)
	$(VENV)/bin/pytest $(PYTEST_ARGS)

test-long: build $(if $(CI),torch) ## the tests that take minutes
	$(VENV)/bin/pytest -m long $(PYTEST_ARGS)

# Kept between runs, outside the checkout; made anew when its list of packages changes.
torch: TORCH_VENV = $(or $(HEADRACE_TORCH_VENV),$(CACHE)/torch-venv)
torch: ## the environment of the torch tests: 4 GB, some minutes
	@if ! cmp --silent requirements/torch.txt $(TORCH_VENV)/.installed; then \
	  echo "installing torch into $(TORCH_VENV)"; \
	  test -x $(TORCH_VENV)/bin/python || $(PYTHON) -m venv $(TORCH_VENV); \
	  $(TORCH_VENV)/bin/python -m pip --quiet --disable-pip-version-check --no-input --no-cache-dir install -r requirements/torch.txt; \
	  cp requirements/torch.txt $(TORCH_VENV)/.installed; \
	fi

demo: build fuse ## see it work; DEMO_ARGS="--source PATH" for a tree of yours
	@$(VENV)/bin/headrace demo $(DEMO_ARGS)

# The only thing that `make demo` wants outside the checkout.
fuse:
	@if ! command -v fusermount3 >/dev/null; then \
	  echo "the mount needs the system package fuse3 (the program fusermount3), which is missing"; \
	  if test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
	    echo "installing fuse3 with apt-get"; \
	    { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y fuse3; } </dev/null >/dev/null \
	      || echo "fuse3 could not be installed: the demo leaves out the mount"; \
	  else \
	    echo "it is not installed for you; the demo leaves out the mount without it"; \
	  fi; \
	fi

wheel: $(VENV)/.installed ## one wheel in dist/, tried in a fresh environment without a compiler
	@rm -rf dist build
	@$(PIP) wheel --no-deps --wheel-dir dist .
	@bash tests/system/wheel-check.sh "$(PYTHON)" dist/headrace-*.whl

clean: ## removes what was built in this checkout; the cache outside it stays
	rm -rf $(VENV) build dist target python/*.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@case "$$CARGO_TARGET_DIR" in "$(CURDIR)"/*) ;; *) echo "left: $$CARGO_TARGET_DIR" ;; esac
