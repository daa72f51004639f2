# Needs only Python 3.11 or later with pip. Targets that need the environment build it first, and
# again after a change of requirements.lock or pyproject.toml.
PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
STAMP := .venv/.installed
# Folder with a link to the checkout under the name of the package.
PARENT := .venv/parent
PROTOS := maskrcnn_trt/protos
# Cache bytecode even if the environment disables that: the targets start up to hundreds of Python
# processes, and compiling the modules of torch takes three seconds in each. `uv` does not compile
# them, because it would compile all 19,000 files, and the targets import only a part of them.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-fast lint check docs dist protos lock clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' Makefile

quickstart: $(STAMP) ## Train, export, serve and measure a small model in runs/quickstart
	$(BIN)/maskrcnn quickstart $(ARGS)

# Test files run in parallel in at most four processes, because each takes much memory. If one dies,
# the run ends, because xdist can hang when it replaces a process
# (https://github.com/pytest-dev/pytest-xdist/issues/1378).
PYTEST = OMP_NUM_THREADS=1 \
	$(BIN)/pytest --numprocesses $(WORKERS) --maxprocesses 4 \
	--dist loadfile --no-loadscope-reorder --max-worker-restart 0
# One more than there are cores: many tests wait for a timer or a subprocess. More are not faster.
WORKERS := $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)

test: $(STAMP) ## Run the tests; ARGS="-k masks" picks some
	$(PYTEST) $(ARGS)

test-fast: $(STAMP) ## Run the tests that are quick and need no exported bundle
	$(PYTEST) -m "not slow and not bundle" $(ARGS)

lint: $(STAMP) ## Check style, types, import layers, spelling and wording
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	MYPYPATH=$(PARENT) $(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python tests/prose/check_prose.py

check: lint test ## Run all checks of CI

docs: .venv/.extra-docs ## Build the documentation site in build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "build/docs/index.html"

dist: .venv/.extra-release ## Build wheel and sdist in dist, check them, and try the wheel on each Python
	$(BIN)/python tests/install/check_release.py

protos: $(STAMP) ## Generate the code of the gRPC services
	$(BIN)/python -m grpc_tools.protoc --proto_path=$(PARENT) \
		--python_out=$(PARENT) --pyi_out=$(PARENT) --grpc_python_out=$(PARENT) \
		$(PROTOS)/maskrcnn/v1/detector.proto
	$(BIN)/python -m grpc_tools.protoc --proto_path=$(PARENT) \
		--descriptor_set_out=$(PROTOS:maskrcnn_trt/%=%)/inference/open_inference.binpb \
		--pyi_out=$(PARENT) --grpc_python_out=$(PARENT) $(PROTOS)/inference/open_inference.proto

lock: $(STAMP) ## Pin the requirements of pyproject.toml; ARGS="--upgrade" for the newest
	echo uv | $(BIN)/uv pip compile pyproject.toml - --extra cpu --extra train --extra dev \
		--universal --python-version 3.11 --generate-hashes --no-annotate \
		--custom-compile-command "make lock" --quiet --output-file requirements.lock $(ARGS)

clean: ## Remove caches and build output, but not .venv and runs
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# uv needs a quarter of pip's time, but does not read pip.conf. If uv cannot reach its index, pip
# installs the same lock.
$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit( \
		"Python 3.11 or later is required, but this is " + sys.version.split()[0] + \
		"; choose another, as in make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	awk '/^uv==/ {found = 1} found; found && !/\\$$/ {exit}' requirements.lock > .venv/uv.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r .venv/uv.lock
	$(BIN)/uv pip install --python $(BIN)/python --require-hashes -r requirements.lock \
		|| $(BIN)/pip install --require-hashes -r requirements.lock
	$(BIN)/uv pip install --python $(BIN)/python --no-deps --no-build-isolation --editable .
	mkdir -p $(PARENT) && ln -sfn ../.. $(PARENT)/maskrcnn_trt
	touch $@

# Extra of pyproject.toml with the tools of one target, in versions that fit requirements.lock.
.venv/.extra-%: $(STAMP)
	$(BIN)/uv pip install --python $(BIN)/python --constraint requirements.lock \
		--requirements pyproject.toml --extra $*
	touch $@
