# make demo   the quick-start notebook, end to end, on an S3 server of its own
# make lab    the same notebook in JupyterLab
# make test   the tests with the versions of constraints.txt: what CI runs
# make latest the same with the newest version of everything, as users install it, in .venv-latest
# make long   what takes longer: second users, random walks, the code of every page
# make hosts  pools on several hosts: real sshd, Slurm and Open MPI in namespaces, as root
# make docs   the pages and the notebooks as HTML, in build/docs; a warning is an error
# make lint   ruff, mypy and bandit
# All set-up is done here, on a machine with Python 3.11 or newer and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := --constraint constraints.txt

# Debian packages, installed as root where apt is there; everything works without them, with less.
VENV_PACKAGES := python3-venv
DEMO_PACKAGES := dataset-fashion-mnist
HOST_PACKAGES := openssh-client openssh-server iproute2
TEST_PACKAGES := $(DEMO_PACKAGES) $(HOST_PACKAGES) chromium
LONG_PACKAGES := ghostscript
CLUSTER_PACKAGES := slurm-wlm munge openmpi-bin

# A file's tests stay together, as they share pools, and so do groups of files: see tests/conftest.py.
SIDE_BY_SIDE := --numprocesses=2 --dist=loadfile --no-loadscope-reorder

# Kernels behave differently with widgets, and cloudpickle with code: the tests take older versions
# from here.
OLDEST := build/cloudpickle-3.1.0
OTHER_KERNELS := build/ipykernel-6.31.0 build/ipykernel-7.3.0

.PHONY: demo lab test latest long hosts docs lint clean

demo: $(VENV)/.demo
	@scripts/apt-install $(DEMO_PACKAGES)
	@$(BIN)/python -m demo.run

lab: $(VENV)/.demo
	@scripts/apt-install $(DEMO_PACKAGES)
	@$(BIN)/python -m demo.run --lab

test: $(VENV)/.test $(OLDEST)
	@scripts/apt-install $(TEST_PACKAGES)
	@$(BIN)/python -m tests.run $(SIDE_BY_SIDE)

latest:
	@$(MAKE) --no-print-directory test VENV=.venv-latest CONSTRAINTS=

long: $(VENV)/.long $(OLDEST) $(OTHER_KERNELS)
	@scripts/apt-install $(TEST_PACKAGES) $(LONG_PACKAGES)
	@$(BIN)/python -m tests.run $(SIDE_BY_SIDE) --long

hosts: $(VENV)/.test
	@scripts/apt-install $(HOST_PACKAGES) $(CLUSTER_PACKAGES)
	@$(BIN)/python -m tests.run $(SIDE_BY_SIDE) --hosts tests/hosts

docs: $(VENV)/.docs
	@$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --conf-dir docs . build/docs
	@echo "build/docs/index.html"

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

# One stamp for each set of dependencies; editing these files installs anew.
$(VENV)/.%: $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing gpupool[$*] into $(VENV); with torch this takes some minutes"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) --editable ".[$*]"
	@touch $@

# One package alone; the rest is that of the environment, but for what ipykernel 6.31 needs besides.
build/%: | $(BIN)/python
	@rm -rf $@.part
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@.part \
		$(subst -,==,$*) $(if $(findstring ipykernel,$*),nest-asyncio)
	@mv $@.part $@

clean:
	rm -rf $(VENV) .venv-latest build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
