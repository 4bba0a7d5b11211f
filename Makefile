# editable_mode=compat puts the clone on the path: with setuptools' newer import hook a script that lies beside a
# clone called `shoal` would find the folder, and `from shoal import LLM` fail.
# Each target sets up .venv first where it is missing or out of date.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Ray's usage statistics stay off, whatever the target starts.
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: serve test lint fmt clean setup proto
.DEFAULT_GOAL := help

help:
	@echo "make serve   start a cluster on this machine (OpenAI API on http://127.0.0.1:8000)"
	@echo "make test    run linters, type checks and the tests"
	@echo "make lint    ruff, mypy and import-linter only"
	@echo "make fmt     format the code"
	@echo "make clean   remove the environment and caches"

$(READY): pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (once; about two minutes, 2.5 GB)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		--config-settings editable_mode=compat -e '.[dev]'
	@touch $@

setup: $(READY)

serve: $(READY)
	@$(BIN)/shoal serve $(ARGS)

# The whole suite goes to two processes: one has the tests of the running cluster, which mostly wait. Single tests stay in one.
test: lint
	$(BIN)/python -m pytest $(or $(ARGS),-n 2 --no-loadscope-reorder)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(READY)
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. cluster/proto/shoal.proto router/rpc/proto/inference.proto

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
