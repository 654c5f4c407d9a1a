# Everything runs in .venv, which any target creates on first use with Python 3.11 or newer.
PYTHON ?= python3
RANKS ?= 2
SECONDS ?= 60
FIRST ?= 0
VENV := .venv
PEERS := .venv-peers
BIN := $(VENV)/bin
DEMO := $(VENV)/.demo
INSTALLED := $(VENV)/.installed
DOCS := $(VENV)/.docs
# Bytecode is written where it is used: compiling all packages takes longer than installing them.
PIP := -m pip install --quiet --no-compile --constraint constraints.txt
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-ci test-exhaustive test-all test-versions test-lowest test-newest test-gpu test-peers fuzz coverage mutants
.PHONY: bench-kernels bench-gpu bench-convergence bench-conversions bench-network bench-loss docs lint format lock release wheel clean

# Compiles kernels in processes of their own, which end: a process that compiles them keeps memory for them.
WARM = $(BIN)/qcomp warmup --compressor sign --compressor minmax & \
	$(BIN)/qcomp warmup --compressor qsgd:levels=7,bucket_size=128; wait

demo: $(DEMO)  ## Train a language model under mpirun with four optimizers and compare them in runs/demo/.
	$(WARM)
	$(BIN)/mpirun -n $(RANKS) $(BIN)/python -m mpi4py examples/train_lm.py --out runs/demo

# Workers keep what numba and JAX compile; more arenas of glibc only keep more. Slow tests often wait for their ranks, so
# three workers keep two cores busy.
PYTEST = MALLOC_ARENA_MAX=2 $(BIN)/python -m pytest --dist worksteal
HERE = not gpu and not nvrtc and not peers
IN_JAX = tests/backends/test_jax.py tests/contract tests/core tests/jax_face tests/optimizers tests/outer
COMMIT = $(or $(shell git rev-parse --short HEAD 2>/dev/null),0)

test: $(INSTALLED)  ## Run the quick tests, in five minutes on two cores.
	$(BIN)/qcomp warmup --compressor sign --dtype float64 & $(WARM)
	$(PYTEST) -n 2 --max-memory 1536 -m "$(HERE) and not slow" --ignore tests/benchmarks

test-ci: $(INSTALLED)  ## Run the quick and the slow tests, and the tenth of the exhaustive ones that the commit's hash chooses.
	$(PYTEST) -n 3 -m "$(HERE)" --tenth $(COMMIT)

test-exhaustive: $(INSTALLED)  ## Run the tests that take long and rarely fail.
	$(PYTEST) -n 2 -m "$(HERE) and exhaustive"

test-all: $(INSTALLED)  ## Run all tests that need no GPU.
	$(PYTEST) -n 2 -m "$(HERE)"

test-versions:  ## Run the quick tests with the lowest and newest versions, and without each optional package, on each Python.
	$(PYTHON) tests/versions.py

test-lowest test-newest:  ## Run them with the lowest or newest versions on one Python.
	$(PYTHON) tests/versions.py --python $(PYTHON) --case $(subst test-,,$@)

coverage: $(INSTALLED)  ## Measure what the quick tests cover, in build/coverage/.
	$(BIN)/python $(PIP) coverage
	$(BIN)/python -m coverage run --source qcomp --branch -m pytest -q -m "$(HERE) and not slow" --ignore tests/benchmarks
	$(BIN)/python -m coverage html --directory build/coverage && $(BIN)/python -m coverage report --sort cover

mutants: $(INSTALLED)  ## Break the core in 300 places, one at a time, and note which quick test fails first; takes half an hour.
	$(BIN)/python -m tests.mutation cover build/cover.json -m "$(HERE) and not slow" --ignore tests/benchmarks
	$(BIN)/python -m tests.mutation run build/cover.json build/mutants.jsonl -m "$(HERE) and not slow" --ignore tests/benchmarks --ignore tests/jax_face

test-gpu: $(INSTALLED)  ## Run the tests that need a CUDA device; they are skipped without one.
	$(BIN)/python $(PIP) --editable '.[dev,cuda]' 'jax[cuda12]'
	$(BIN)/python -m pytest -m "gpu or nvrtc" tests
	XLA_PYTHON_CLIENT_PREALLOCATE=false $(BIN)/python -m pytest -m "$(HERE)" -k jax $(IN_JAX)

test-peers:  ## Compare tests/peers/deepspeed_steps.py with DeepSpeed itself, in a separate environment.
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python $(PIP) setuptools wheel --editable '.[torch,testing]' pytest-timeout
	DS_BUILD_OPS=0 $(PEERS)/bin/python $(PIP) --no-build-isolation deepspeed==0.19.6
	$(PEERS)/bin/python -m pytest -m peers -s tests/peers

fuzz: $(INSTALLED)  ## Read new damaged payloads and messages for SECONDS; QCOMP_KERNELS=numba for kernels, FIRST=N for other ones.
	QCOMP_KERNELS=$${QCOMP_KERNELS:-pure} $(BIN)/python -m tests.fuzz --seconds $(SECONDS) --first $(FIRST)

bench-kernels: $(INSTALLED)  ## Time kernels on the CPU against a copy of their input; writes docs/benchmarks/.
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/kernels.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/arithmetic.py
	$(BIN)/python benchmarks/torch_optimizers.py
	$(BIN)/python benchmarks/steps.py
	$(BIN)/python benchmarks/jax_jit.py

bench-gpu: $(INSTALLED)  ## Time kernels on a CUDA device against a copy on it; writes docs/benchmarks/.
	$(BIN)/python $(PIP) --editable '.[dev,cuda]'
	$(BIN)/python benchmarks/gpu.py

bench-convergence: $(INSTALLED)  ## Train three tasks with each optimizer over five seeds (takes hours; resumes where it stopped).
	$(BIN)/python benchmarks/noise_floor.py
	$(BIN)/python benchmarks/study.py

bench-conversions: $(INSTALLED)  ## Train scripts like public ones beside their conversions, and resume both; takes half an hour.
	$(BIN)/python benchmarks/conversions.py

bench-network: $(INSTALLED)  ## Time training over links of 100 Mbit/s to 10 Gbit/s between network namespaces; needs root and iproute2.
	$(BIN)/python benchmarks/network_times.py

bench-loss: $(INSTALLED)  ## Race to a loss on links of 10 Mbit/s to 10 Gbit/s (takes days; resumes where it stopped); needs root and iproute2.
	$(BIN)/python benchmarks/loss_race.py
	$(BIN)/python benchmarks/powersgd_times.py

docs: $(DOCS)  ## Make the documentation site in build/docs/.
	$(BIN)/python -m sphinx --jobs auto --fail-on-warning --keep-going --nitpicky --quiet docs build/docs

lint: $(INSTALLED)  ## Check style and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

wheel: $(INSTALLED)  ## Build the sdist and the wheel in dist/.
	$(BIN)/python -m build

release: $(DOCS)  ## Run the checklist of RELEASE.md; writes to build/ and pushes nothing.
	$(BIN)/python -m tests.release

lock: $(INSTALLED)  ## Write the exact versions of this environment to constraints.txt.
	$(BIN)/python $(PIP) --editable '.[dev,docs]'
	(echo '# The development environment, as `make lock` writes it; read by the Makefile and tests/versions.py.'; \
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+[a-z0-9]*$$//') > constraints.txt

format: $(INSTALLED)  ## Format the code.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove the environments and all results.
	rm -rf $(VENV) $(VENV)-versions $(PEERS) build docs/api runs .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "qcomp needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)

$(DEMO): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python $(PIP) --editable '.[demo]'
	touch $@

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python $(PIP) --editable '.[dev]'
	$(BIN)/python -c 'import hypothesis, jax, numba, pytest, torch._dynamo, torch.distributed.fsdp'  # else each worker compiles them
	touch $@ $(DEMO)

$(DOCS): $(INSTALLED)
	$(BIN)/python $(PIP) --editable '.[docs]'
	touch $@
