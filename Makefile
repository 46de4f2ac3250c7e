# `make test` and `make demo` need only Python 3.11+ and make: they build .venv themselves and reuse it.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# threads that spin while they wait slow each other down on a shared machine
export OMP_WAIT_POLICY := PASSIVE

.PHONY: setup test test-slow lint demo bench clean
setup: $(STAMP)

# torch first and pinned: a looser pin, here or through another package, would fetch a CUDA build.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $(STAMP)

# the report's page is tested in a real browser; without one those tests are skipped and say so
BROWSER := .venv/.browser
$(BROWSER): $(STAMP)
	sh scripts/install_browser.sh
	touch $(BROWSER)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# one torch thread per worker: two workers on two cores would otherwise fight over them
test: lint $(BROWSER)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

demo: $(STAMP)
	$(BIN)/vardass demo --out demo

bench: $(STAMP)
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf .venv demo
