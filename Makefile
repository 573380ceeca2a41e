# Two commands do everything on a fresh machine with python3 and make:  make demo  and  make test
PYTHON ?= python3
BIN := .venv/bin
RUN := recipes/classifier_docstrings.yaml

.PHONY: demo test lint bench bench-gpu clean

demo: .venv/ready
	@echo "── the run file, every value and where it came from"
	$(BIN)/paceline explain $(RUN)
	@echo "── train on 2 local ranks"
	$(BIN)/paceline train $(RUN) parallel.ranks=2
	@echo "── prove that 1 rank and 2 ranks give the same answer"
	$(BIN)/paceline check $(RUN) --ranks 1,2

test: lint
	$(BIN)/python -m pytest

lint: .venv/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# DATA=FOLDER names a folder with AG News; without it the CPU benchmark uses docstrings.
bench: .venv/ready-dev
	$(BIN)/python benchmarks/classifier_cpu.py $(DATA)

bench-gpu: .venv/ready-dev
	$(BIN)/python benchmarks/classifier_gpu.py $(or $(DATA),data/ag_news)

# torch first, at the pinned version: what depends on it then finds it there.
.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/ready-dev: .venv/ready
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv
