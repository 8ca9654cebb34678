# `make demo` trains the handwritten digits in two processes; `make test` runs all tests. Each sets itself up.
PYTHON ?= python3
BIN := .venv/bin
# Bytecode saves each process that tests start a fifth of a second, and each that runs tests six.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-versions slow mutants coverage tiers durations lint docs system-deps clean

demo: .venv/.installed
	$(BIN)/tfdist train --config=digits_multi_worker --workdir=runs/demo --overwrite

# Processes that run tests: one more than there are cores for those that compute, and one for those that mostly wait.
# A file is one process's. After a process that crashed, pytest-xdist would wait for the rest of its file without limit.
JOBS ?= $(shell expr $$(nproc) + 1)
WAITING ?= 1
PYTEST = $(BIN)/python -m pytest --numprocesses=$$(($(JOBS) + $(WAITING))) --waiting-processes=$(WAITING) --dist=loadfile \
	--no-loadscope-reorder --max-worker-restart=0 --second-chance --durations=10 --durations-path=tests/durations.json $(STORE)

# A part of the tests of a tier: `make slow SLICE=3/12`.
SLICE ?= 1/1
PART = --group=$(word 1,$(subst /, ,$(SLICE))) --splits=$(word 2,$(subst /, ,$(SLICE)))

# Each way through the code once. Format and style come first, which take a second; types are checked beside the tests.
test: .venv/.installed
	$(STYLE)
	$(TYPES) & types=$$!; $(PYTEST); tests=$$?; wait $$types || { echo "mypy found errors: make lint"; exit 1; }; exit $$tests

# The same ways with other cases.
test-all: .venv/.installed
	$(PYTEST) -m "full and not slow" $(PART)

# Long schedules.
slow: .venv/.installed
	$(PYTEST) -m slow $(PART)

# Mutants, as tools/mutants.py says: changes of the package, and the tests that notice them. `make mutants NEW=--new` goes on where it stopped.
SEED ?= 73
mutants: .venv/.installed
	$(BIN)/python -m tools.mutants --seed=$(SEED) $(NEW)

# Lines of the package that the first tier runs, in all processes that it starts; for a part, `make coverage TESTS=tests/launch`.
coverage: .venv/.coverage
	rm -rf build/coverage && mkdir -p build/coverage
	-$(subst -m pytest,-m coverage run -m pytest,$(PYTEST)) --timeout=900 $(TESTS)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report --sort=cover | tail -n 40

# Which tests of the first tier go to the second one: `tools/tiers.py` says. About forty minutes.
tiers: .venv/.coverage
	rm -rf build/coverage && mkdir -p build/coverage
	ALL_OF_FIRST_TIER=1 $(BIN)/python -m pytest --collect-only -q > build/tests.txt
	-ALL_OF_FIRST_TIER=1 $(subst -m pytest,-m coverage run -m pytest,$(PYTEST)) --timeout=900
	$(BIN)/python -m tools.tiers --tests=build/tests.txt

.venv/.coverage: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt 'coverage>=7.13'
	touch $@

# Measures the seconds of all tests, by which files are ordered and tiers divided; for one tier, `make test STORE=--store-durations`.
durations:
	$(MAKE) test STORE=--store-durations
	$(MAKE) test-all STORE=--store-durations
	$(MAKE) slow STORE=--store-durations

# With the oldest, the newest and the next versions; ROW=oldest, ROW=newest or ROW=next for one of them. Failures of the next are reported.
test-versions:
	$(PYTHON) tools/versions.py $(if $(ROW),--only=$(ROW)) --numprocesses=$(JOBS) --dist=loadfile --no-loadscope-reorder --max-worker-restart=0

STYLE = $(BIN)/ruff check . && $(BIN)/ruff format --check .
TYPES = $(BIN)/mypy

lint: .venv/.installed
	$(STYLE)
	$(TYPES)

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
