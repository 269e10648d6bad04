# Two commands are enough on a fresh machine: `make demo` and `make test`.
# PYTHON and TORCH_INDEX say what to install with and from where: see scripts/install.
BIN := .venv/bin
export PYTHON
export TORCH_INDEX

.PHONY: help install demo test test-all test-gpu-stand-in check docs clean

install: .venv/installed
	@$(BIN)/python -c 'import torch, flatout' 2>/dev/null || scripts/install

.venv/installed: pyproject.toml constraints.txt scripts/install
	scripts/install

demo: install
	$(BIN)/flatout tune --budget 180 examples/digits_mlp.py
	$(BIN)/flatout run examples/digits_mlp.py

# Each worker has one thread and about 1 GiB.
TEST_WORKERS ?= 2

test: install
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal -m "not slow"

test-all: install
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal

# torch's own CUDA build over a GPU made of host memory: see tests/gpu/stand_in/README.md. Not part of `make test`.
CUDA_VENV ?= $(HOME)/.cache/flatout/cuda-venv
STAND_IN ?= $(HOME)/.cache/flatout/stand-in
FAKEGPU ?=

$(CUDA_VENV)/bin/python:
	"$$(scripts/install --check)" -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/python -m pip install --quiet torch==2.15.0
	grep -vE '^(torch|triton)==' constraints.txt > $(CUDA_VENV)/constraints.txt
	$(CUDA_VENV)/bin/python -m pip install --quiet -c $(CUDA_VENV)/constraints.txt -e '.[dev]'

$(STAND_IN)/libhost_executor.so: $(CUDA_VENV)/bin/python tests/gpu/stand_in/build $(wildcard tests/gpu/stand_in/*.cpp)
	tests/gpu/stand_in/build $(CUDA_VENV) $(STAND_IN) $(FAKEGPU)

test-gpu-stand-in: $(STAND_IN)/libhost_executor.so
	STAND_IN=$(STAND_IN) PYTHONPATH=$(CURDIR) tests/gpu/stand_in/gpu --gpus 2 $(CUDA_VENV)/bin/python -m pytest tests/gpu

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, in build/site; broken links are errors.
docs: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

help:
	@echo "make demo      a virtual environment, and an example tuned and run"
	@echo "make check     lint, formatting, types"
	@echo "make test      all tests but the slow ones: under 5 minutes on two cores"
	@echo "make test-all  all tests, as CI runs them"
	@echo "make docs      the documentation's site"

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache
