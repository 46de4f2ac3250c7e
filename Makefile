# `make test` and `make demo` need only Python 3.11+ and make: they build .venv themselves and reuse it.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# threads that spin while they wait slow each other down on a shared machine
export OMP_WAIT_POLICY := PASSIVE

.DEFAULT_GOAL := help
.PHONY: help setup test floors test-slow lint audit wheel docs demo bench clean
help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) ## make .venv with all that is needed

# torch first and pinned: a looser pin, here or through another package, would fetch a CUDA build. The
# demo imports few modules of these packages; tests start many processes, for which all are compiled at once.
READY := .venv/.ready
$(READY): pyproject.toml constraints.txt
	@echo "installing into .venv: some minutes the first time"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --no-compile -c constraints.txt torch
	$(BIN)/pip install -q --no-compile -c constraints.txt -e '.[adapt,cli,fast,lab,plot]'
	touch $(READY)

# recipes need the data or a single module of these, and not what they ask for: another pandas, torchdyn
ALONE := causallib scanpy torchcfm
$(STAMP): $(READY)
	$(BIN)/pip install -q --no-compile -c constraints.txt -e '.[dev]'
	$(BIN)/pip install -q --no-compile --no-deps -c constraints.txt $(ALONE)
	$(BIN)/python -m compileall -q -j 0 .venv/lib >/dev/null 2>&1 || true
	touch $(STAMP)

# the report's page is tested in a real browser; without one those tests are skipped and say so
BROWSER := .venv/.browser
$(BROWSER): $(STAMP)
	sh scripts/install_browser.sh
	touch $(BROWSER)

lint: $(STAMP) audit ## style, types, import layers, size of rooms and known vulnerabilities
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/room_sizes.py

audit: $(STAMP) ## known vulnerabilities of the packages in constraints.txt
	$(BIN)/python scripts/audit.py

# one torch thread per worker: two workers on two cores would otherwise fight over them
test: lint $(BROWSER) ## all tests but the slow ones; what CI runs
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

floors: $(STAMP) ## tests of the integrations with the lowest versions that pyproject.toml allows
	$(BIN)/python scripts/floors.py

test-slow: $(STAMP) ## tests that take minutes: processes killed again and again
	$(BIN)/python -m pytest -m slow

demo: $(READY) ## what the package does, on embedded data, in minutes
	$(BIN)/vardass demo --out demo

docs: $(STAMP) ## the documentation, in site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: $(STAMP) ## sdist and wheel, in dist/
	rm -rf dist
	$(BIN)/python -m hatchling build

bench: $(STAMP) ## the numbers in benchmarks/results, made again
	$(BIN)/python benchmarks/run.py

clean: ## remove .venv, the demo's files and what was built
	rm -rf .venv .venv-floors demo site dist .cache
