# `make demo` trains the handwritten digits in two processes; `make test` runs all tests. Each sets itself up.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-all test-torch test-versions slow lint docs system-deps clean

demo: .venv/.installed
	$(BIN)/tfdist train --config=digits_multi_worker --workdir=runs/demo

# One process more than there are cores, as much of the time tests wait for others to start; each takes whole files.
JOBS ?= $(shell expr $$(nproc) + 1)
# After a process that crashed, pytest-xdist would wait for the rest of its file for ever.
PYTEST = $(BIN)/python -m pytest --numprocesses=$(JOBS) --dist=loadfile --no-loadscope-reorder --max-worker-restart=0 --durations=10

# What neither `full` nor `slow` marks.
test: lint
	$(PYTEST)

# A part of the tests of test-all and slow: `make slow SLICE=3/8`.
SLICE ?= 1/1
PART = --group=$(word 1,$(subst /, ,$(SLICE))) --splits=$(word 2,$(subst /, ,$(SLICE))) --durations-path=tests/slow_durations.json

# What goes the way of another test, with another case.
test-all: .venv/.installed
	$(PYTEST) -m "full and not slow" $(PART)

# What needs PyTorch: the transport by gloo, and the comparison with PyTorch. The other tests go without, as most users do.
test-torch: .venv/.torch
	$(PYTEST) -m "not slow" tests/collectives/test_gloo.py tests/multiprocess/test_gloo.py tests/tools/test_peers.py

.venv/.torch: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[gloo]'
	touch $@

# Long schedules.
slow: .venv/.installed
	$(PYTEST) -m slow $(PART)

# With the ends of the ranges of versions; ROW=oldest or ROW=newest for one of them.
test-versions:
	$(PYTHON) tools/versions.py $(if $(ROW),--only=$(ROW)) --numprocesses=$(JOBS) --dist=loadfile --no-loadscope-reorder --max-worker-restart=0

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The pages and the API reference, as a site in build/site; a dead link is an error.
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.venv/.docs: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

# What tests need from the operating system, by Debian's names; without, those that need it are skipped.
SYSTEM := chromium iproute2 munge openmpi-bin slurm-wlm

system-deps:
	@if dpkg -s $(SYSTEM) >/dev/null 2>&1; then echo "System packages are there: $(SYSTEM)."; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $(SYSTEM); \
	else echo "Install these as root, or their tests are skipped: $(SYSTEM)."; fi

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv runs logs build *.egg-info
