# `make demo` trains the handwritten digits in two processes; `make test` runs all tests. Each sets itself up.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-fit test-rest lint slow system-deps clean

demo: .venv/.installed
	$(BIN)/python -m tfdist.train --config=configs/digits_multi_worker.py --workdir=runs/demo

# In two processes that take about as long: much of the time tests wait for others to start.
test: lint
	$(MAKE) --jobs=2 --output-sync=target test-fit test-rest

# The first three share fixtures.
FIT := $(addprefix tests/multiprocess/test_,fit.py strategies.py trainer.py parameter_server.py scripts.py) \
	$(addprefix tests/end_to_end/test_,train.py examples.py schedulers.py) tests/strategies/test_create_strategy.py

test-fit: .venv/.installed
	$(BIN)/python -m pytest $(FIT)

test-rest: .venv/.installed
	$(BIN)/python -m pytest $(addprefix --ignore=,$(FIT))

slow: .venv/.installed
	$(BIN)/python -m pytest -m slow

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What tests need from the operating system, by Debian's names; without, those that need it are skipped.
SYSTEM := iproute2 munge openmpi-bin slurm-wlm

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
