# Needs python3.11 (or a newer python3), pip and git; everything else goes into .venv.

.DEFAULT_GOAL := help
.PHONY: help demo test lint docs bench peers checkout clean

# The first of these that runs and is new enough; or choose: make test PYTHON=/path/to/python
CANDIDATES := python3.11 python3 python
IS_NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
ifndef PYTHON
PYTHON := $(shell for p in $(CANDIDATES); do \
	$$p -c '$(IS_NEW_ENOUGH)' >/dev/null 2>&1 && echo $$p && break; done)
endif

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

# Processes for the tests; 0 runs them in the one process, as a debugger wants it.
JOBS ?= 2
# More arguments for pytest: make test ARGS="-k layout -x"
ARGS ?=
# What `make bench` runs.
SUITE ?= core
# A checkout of tensordict, whose own tests `make peers` runs against tdbridge.
TENSORDICT ?=

help:
	@echo "make demo    run examples/digits.py"
	@echo "make test    tests, doctests and the code blocks of README.md and docs/, with coverage"
	@echo "make lint    formatting, lint rules, types"
	@echo "make docs    the documentation, into docs/_build/html"
	@echo "make bench   the quick benchmarks (SUITE=$(SUITE))"
	@echo "make peers   tensordict's own tests against tdbridge (TENSORDICT=/path/to/checkout)"
	@echo "make clean   remove everything that the above made, .venv included"

# One environment for every target, installed again only when what it is made from changes.
# The constraints keep pip to the tested versions.
$(STAMP): pyproject.toml constraints.txt
	@"$(PYTHON)" -c '$(IS_NEW_ENOUGH)' 2>/dev/null || { \
		echo "tdbridge needs Python 3.11 or newer. Tried: $(or $(PYTHON),$(CANDIDATES))." >&2; \
		echo "Install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; \
		exit 1; }
	"$(PYTHON)" -m venv $(VENV)
	$(PY) -m pip install --disable-pip-version-check --quiet -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(STAMP)
	$(PY) examples/digits.py

test: $(STAMP)
	$(PY) -m pytest -n $(JOBS) --dist loadgroup --cov --cov-report=term $(ARGS)

lint: $(STAMP)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m basedpyright

docs: $(STAMP)
	$(PY) -m sphinx -n -W --keep-going -b html docs docs/_build/html

bench: $(STAMP)
	$(PY) -m benchmarks $(SUITE) --quick

# Nothing is written into the checkout.
PEERS := PYTHONDONTWRITEBYTECODE=1 $(PY) -m pytest -q -p no:cacheprovider -W ignore::DeprecationWarning
PEER_TESTS = $(addprefix $(TENSORDICT)/test/,$(1))
CONSOLIDATE := $(addprefix tensordict/test_,generic.py lazy.py nontensor.py) \
	tensorclass/test_tensorclass.py distributed/test_ucxx.py
PYTREE := nn/test_functorch.py tensordict/test_generic.py
DISTRIBUTED := distributed/test_distributed.py

peers: checkout $(STAMP)
	$(PEERS) -p tests.peers.tensordict_consolidate $(call PEER_TESTS,$(CONSOLIDATE)) -k consolidate
	$(PEERS) -p tests.peers.tensordict_pytree --registry jax $(call PEER_TESTS,$(PYTREE)) -k pytree
	$(PEERS) -p tests.peers.tensordict_pytree --registry optree $(call PEER_TESTS,$(PYTREE)) -k pytree
	$(PEERS) -p tests.peers.tensordict_distributed $(call PEER_TESTS,$(DISTRIBUTED))

checkout:
	@test -d "$(TENSORDICT)/test/tensordict" || { \
		echo "Got TENSORDICT='$(TENSORDICT)', which is no checkout of tensordict. Get one:" >&2; \
		echo "  git clone https://github.com/pytorch/tensordict /tmp/tensordict" >&2; \
		echo "  make peers TENSORDICT=/tmp/tensordict" >&2; \
		exit 1; }

clean:
	rm -rf $(VENV) docs/_build build dist htmlcov .coverage .coverage.* \
		.pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
