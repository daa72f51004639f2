# Works from a bare Python 3.11 or later with pip: what needs the environment makes it first, once,
# and again when the lock or pyproject.toml changes.
PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
STAMP := .venv/.installed
# Holds a link to the checkout, whatever its name, under the package's own.
PARENT := .venv/parent
PROTOS := maskrcnn_trt/protos

.DEFAULT_GOAL := help
.PHONY: help quickstart test lint check protos lock clean

help: ## Say what can be made
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' Makefile

quickstart: $(STAMP) ## Draw data, train, export, serve and measure; results in runs/quickstart
	$(BIN)/maskrcnn quickstart $(ARGS)

# Files in parallel; more processes than that would take too much memory. One that dies ends the run,
# as xdist hangs where it replaces it (https://github.com/pytest-dev/pytest-xdist/issues/1378).
test: $(STAMP) ## Run the tests; ARGS="-k masks" picks some
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist loadfile \
		--max-worker-restart 0 $(ARGS)

lint: $(STAMP) ## Check style, types and the layers between folders
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	MYPYPATH=$(PARENT) $(BIN)/mypy
	$(BIN)/lint-imports

check: lint test ## Everything that CI checks

protos: $(STAMP) ## Generate the code of the gRPC services
	$(BIN)/python -m grpc_tools.protoc --proto_path=$(PARENT) \
		--python_out=$(PARENT) --pyi_out=$(PARENT) --grpc_python_out=$(PARENT) \
		$(PROTOS)/maskrcnn/v1/detector.proto
	$(BIN)/python -m grpc_tools.protoc --proto_path=$(PARENT) \
		--descriptor_set_out=$(PROTOS:maskrcnn_trt/%=%)/inference/open_inference.binpb \
		--pyi_out=$(PARENT) --grpc_python_out=$(PARENT) $(PROTOS)/inference/open_inference.proto

lock: $(STAMP) ## Pin what pyproject.toml asks for, with hashes; ARGS="--upgrade" for the newest
	echo uv | $(BIN)/uv pip compile pyproject.toml - --extra train --extra dev \
		--universal --python-version 3.11 --generate-hashes --no-annotate \
		--custom-compile-command "make lock" --quiet --output-file requirements.lock $(ARGS)

clean: ## Remove caches and build output; .venv and runs stay
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# uv installs in a quarter of pip's time but reads no pip.conf: where its index is out of reach, pip
# installs the same lock.
$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit( \
		"Python 3.11 or later is needed, this is " + sys.version.split()[0] + \
		"; name another one: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	awk '/^uv==/ {found = 1} found; found && !/\\$$/ {exit}' requirements.lock > .venv/uv.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r .venv/uv.lock
	$(BIN)/uv pip install --python $(BIN)/python --require-hashes -r requirements.lock \
		|| $(BIN)/pip install --require-hashes -r requirements.lock
	$(BIN)/uv pip install --python $(BIN)/python --no-deps --no-build-isolation --editable .
	mkdir -p $(PARENT) && ln -sfn ../.. $(PARENT)/maskrcnn_trt
	touch $@
