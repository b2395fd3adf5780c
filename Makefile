# make demo   the quick-start notebook, end to end, on an S3 server of its own
# make lab    the same notebook in JupyterLab
# make test   the tests            make lint   ruff, mypy and bandit
# make long   the tests with their long variants
# All set-up is done here, on a machine with Python 3.11 or newer and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Debian packages, installed as root where apt is there; everything works without them, with less.
VENV_PACKAGES := python3-venv
DEMO_PACKAGES := dataset-fashion-mnist
TEST_PACKAGES := $(DEMO_PACKAGES) chromium ghostscript iproute2

# Most tests wait more than they compute. A file's tests stay together, as they share pools, and so
# do groups of files; tests/conftest.py has the groups and the order.
SIDE_BY_SIDE := --numprocesses=3 --dist=loadfile --no-loadscope-reorder

# Kernels behave differently with widgets: the tests take those of older versions from here.
OTHER_KERNELS := build/ipykernel-6.31.0 build/ipykernel-7.3.0

.PHONY: demo lab test long lint clean

demo: $(VENV)/.demo
	@scripts/apt-install $(DEMO_PACKAGES)
	@$(BIN)/python -m demo.run

lab: $(VENV)/.demo
	@scripts/apt-install $(DEMO_PACKAGES)
	@$(BIN)/python -m demo.run --lab

test: $(VENV)/.test $(OTHER_KERNELS)
	@scripts/apt-install $(TEST_PACKAGES)
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE)

long: $(VENV)/.test $(OTHER_KERNELS)
	@scripts/apt-install $(TEST_PACKAGES)
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) --long

lint: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/bandit --quiet --configfile pyproject.toml --recursive gpupool

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "gpupool needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || scripts/apt-install $(VENV_PACKAGES)
	@echo "Making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# One stamp for each set of dependencies; editing pyproject.toml installs anew.
$(VENV)/.%: $(BIN)/python pyproject.toml
	@echo "Installing gpupool[$*] into $(VENV); with torch this takes some minutes"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[$*]"
	@touch $@

# ipykernel alone; the rest is the same as that of .venv, but for what 6.31 needs besides.
build/ipykernel-%: | $(VENV)/.test
	@rm -rf $@.part
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@.part \
		ipykernel==$* nest-asyncio
	@mv $@.part $@

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
