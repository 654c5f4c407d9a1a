# Everything runs in .venv, which any target makes on first use from a Python 3.11 or newer.
PYTHON ?= python3
RANKS ?= 2
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test bench-kernels lint format clean

demo: $(INSTALLED)  ## Train a language model under mpirun with four optimizers and compare them in runs/demo/.
	$(BIN)/mpirun -n $(RANKS) $(BIN)/python -m mpi4py examples/train_lm.py --out runs/demo

test: $(INSTALLED)  ## Run all tests.
	$(BIN)/python -m pytest -n 2 --dist worksteal

bench-kernels: $(INSTALLED)  ## Time the kernels against a copy of their input; writes docs/benchmarks/.
	NUMBA_NUM_THREADS=1 $(BIN)/python benchmarks/kernels.py --out docs/benchmarks

lint: $(INSTALLED)  ## Check style and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)  ## Put the code into its standard form.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove the environment and all results.
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "qcomp needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
