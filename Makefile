# Set-up and daily commands. Needs Python 3.11 to 3.13 and make, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODELS := .venv-models
SECTION ?=
PAIRS ?=
SEED ?= 1
PROGRAMS ?= 300
PACKAGE ?=
SAMPLE ?= 100
CHAOS ?=
# Tests that make tensors: all but those of geometry and plans, of the tree itself, and of other people's models.
DEVICE_TESTS := tests $(addprefix --ignore=tests/,geometry transfer house models)

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu test-device test-models test-hosts lint types docs bench matrix fuzz mutants chaos check clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

demo: $(STAMP)  ## run the whole story and the examples on 4 local ranks, about a minute
	$(BIN)/shardwise demo
	$(BIN)/python examples/train_transformer.py
	$(BIN)/python examples/recsys_embeddings.py
	@echo "a trainer (4 ranks) and a server (2 ranks, other names and layouts) in two programs, then both in one process:"
	@export OMP_NUM_THREADS=1; \
	  $(BIN)/torchrun --nproc-per-node 4 --master-port 29501 examples/sync_weights.py trainer & trainer=$$!; \
	  $(BIN)/torchrun --nproc-per-node 2 --master-port 29502 examples/sync_weights.py server && wait $$trainer
	$(BIN)/python examples/sync_weights.py alone

test: $(STAMP)  ## run every test: tests/, the doctests of src/, the code in README and docs/
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=25

test-gpu: $(STAMP)  ## run the tests that make tensors on the GPU's; needs a torch with CUDA
	SHARDWISE_TEST_DEVICE=cuda $(BIN)/python -m pytest $(DEVICE_TESTS) --dist loadfile --durations=25

test-device: $(STAMP)  ## run the tests that make tensors on a device in host memory that stands in for a GPU; needs a C++ compiler and ninja
	SHARDWISE_TEST_DEVICE=standin $(BIN)/python -m pytest $(DEVICE_TESTS) --dist loadfile --durations=25

test-models: $(MODELS)/.installed  ## models of transformers, peft, timm and others, in an environment of their own (5 GB); writes docs/models.md
	rm -f build/models.jsonl
	SHARDWISE_MODELS_TABLE=docs/models.md $(MODELS)/bin/python -m pytest tests/models

test-hosts: $(STAMP)  ## tests of moves and collectives on two hosts, as network namespaces with a link between them (Linux, root)
	SHARDWISE_TEST_HOSTS=1 $(BIN)/python -m pytest tests/comm/test_network_hosts.py tests/tensor/test_moves_ranks.py \
	    tests/comm/test_process_group.py tests/nn/test_modules_ranks.py tests/nn/test_prefetch_ranks.py

lint: $(STAMP)  ## check the style with ruff
	$(BIN)/ruff check .

types: $(STAMP)  ## check the types with mypy (strict over src/)
	$(BIN)/mypy src $(wildcard bench examples tools)

docs: $(VENV)/.docs-installed  ## build the site in build/site; a broken link or reference is an error
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/site
	@echo "open build/site/index.html"

bench: $(STAMP)  ## run the benchmarks; one with SECTION=move; the ratios of two results with SECTION="compare A B"
	$(BIN)/python -m bench $(SECTION)

matrix: $(STAMP)  ## try the wheel with each supported torch and Python, 5 GB each; some: PAIRS="2.14.0 2.15.0:3.13"
	$(BIN)/python tools/matrix.py $(PAIRS)

fuzz: $(STAMP)  ## run random programs against whole tensors; others with SEED=5 PROGRAMS=1000
	$(BIN)/python -m tools.fuzz --seed $(SEED) --programs $(PROGRAMS)
	$(BIN)/python -m tools.fuzz --seed $(SEED) --programs $(PROGRAMS) --empty-ranks
	$(BIN)/python -m tools.fuzz --seed $(SEED) --programs $(PROGRAMS) --compiled
	$(BIN)/python -m tools.fuzz --seed $(SEED) --programs 40 --processes

mutants: $(STAMP)  ## change the source a little, see which tests notice; one package with PACKAGE=ops
	$(BIN)/python -m tools.mutants $(if $(PACKAGE),--package $(PACKAGE)) --sample $(SAMPLE) --seed $(SEED)

chaos: $(STAMP)  ## attack ranks, saves, files and disks at length, and soak, two hours; one part with CHAOS=ranks
	@for part in $(or $(CHAOS),ranks checkpoints disks sync soak); do \
	  $(BIN)/python -W ignore -m tests.chaos.$$part || exit 1; done

check: lint types docs test  ## lint + types + docs + test: what .ci/run runs

clean:  ## remove the environment, caches and build outputs
	rm -rf $(VENV) $(MODELS) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov
	find src tests bench examples tools -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# The stamp is newer than the files it depends on exactly when the environment is up to date.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "Shardwise needs Python 3.11 to 3.13; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	       "Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.docs-installed: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
	@touch $@

# torchrec asks for the CUDA build of fbgemm, whose files are those of the CPU build: so both without what they ask for.
$(MODELS)/.installed: pyproject.toml constraints.txt constraints-models.txt
	@$(MODELS)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(MODELS)
	$(MODELS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -c constraints-models.txt -e '.[dev,models,remote-tests]'
	$(MODELS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints-models.txt torchrec fbgemm-gpu-cpu
	@touch $@
