# Two commands are enough on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3.11
BIN := .venv/bin

.PHONY: install demo test check clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: install
	$(BIN)/flatout tune --budget 180 examples/digits_mlp.py
	$(BIN)/flatout run examples/digits_mlp.py

test: install
	$(BIN)/python -m pytest

check: install
	$(BIN)/ruff check flatout tests examples benchmarks
	$(BIN)/ruff format --check flatout tests examples benchmarks
	$(BIN)/mypy

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache
