# `make setup` once on a fresh machine; every other target does it by itself.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: setup train test sweeps check accept bench docs clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip setuptools
	$(BIN)/python -m pip install -q "$(TORCH)"
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	touch $(READY)

train: setup           ## a small model on Python's own sources: about three minutes, no download
	$(BIN)/mycel train

test: setup            ## everything
	$(BIN)/python -m pytest -n 3 --dist worksteal

sweeps: setup          ## everything, and all cases of the long sweeps
	MYCEL_SWEEPS=all $(BIN)/python -m pytest -n 3 --dist worksteal

check: setup           ## lint, types, fast tests
	$(BIN)/ruff check mycel tests bench docs examples
	$(BIN)/ruff format --check mycel tests bench docs examples
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not slow"

accept: setup          ## rewrite golden texts; read the diff before committing
	MYCEL_ACCEPT=1 $(BIN)/python -m pytest -n 3 --dist worksteal $$(grep -l "^from golden import" tests/test_*.py)

docs: setup            ## the site from docs/ in site/: every link checked, nothing fetched when it is read
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	! grep -rlE '<(script|link|img)[^>]*(src|href)="https?://' site --include='*.html'

bench: setup           ## ours and the peers in the same run
	$(BIN)/python bench/dispatch.py
	$(BIN)/python bench/capture.py
	$(BIN)/python bench/grad.py
	$(BIN)/python bench/cpu_step.py
	$(BIN)/python bench/bytes.py
	$(BIN)/python bench/lowering.py
	$(BIN)/python bench/ddp.py
	$(BIN)/python bench/clock.py
	$(BIN)/python bench/generate.py

clean:
	rm -rf $(VENV) site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
