# Commands of the project. Each works from nothing: the first one makes .venv and installs into it.
#   PIP_FLAGS   more words for pip: another package index, a local folder of wheels, ...
#   PYTHON      the interpreter that .venv is made with (3.10 or later)
#   TORCH       another version of torch than the pinned one, in an environment of its own: make test TORCH=2.6.0
#   PYTEST_FLAGS  more words for pytest (-k name, -x, -n 0: one after the other, ...)

PYTHON ?= python3
PIP_FLAGS ?=
PYTEST_FLAGS ?=
TORCH ?=
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Most tests wait for processes of theirs: four at once keep two cores busy.
PARALLEL := -n 4

.PHONY: help install demo test test-slow check format docs pictures bench clean

help:
	@echo "make demo       train three times, twice with faults, compare the weights bit for bit, report what each fault cost"
	@echo "make install    makes .venv; each of the others does so as well"
	@echo "make test       the tests, with 3 of 10 that start whole jobs, and those of what changed; FT_TEST_SHARE=1: all,"
	@echo "                TORCH=2.6.0 runs them with that release, in an environment of its own"
	@echo "make test-slow  the long tests"
	@echo "make check      format, lint, types, import contract"
	@echo "make format     rewrite the files in the project's format"
	@echo "make docs       rewrite the pages of docs/ that are made of the code"
	@echo "make pictures   take the pictures of the status page in docs/ from a job that runs; needs Chromium"
	@echo "make bench      the benchmarks, beside torchrun"
	@echo "make clean      remove .venv and every output"

# pip's constraints pin torch: unpinned, it may fetch gigabytes of CUDA packages.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): a minute or two."
	@sed 's/^torch==.*/$(if $(TORCH),torch==$(TORCH),&)/' constraints.txt >$(VENV)/constraints.txt
	$(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_FLAGS) -c $(VENV)/constraints.txt -e '.[dev]'
	touch $@

install: $(INSTALLED)

demo: $(INSTALLED)
	$(BIN)/python scripts/demo/run.py

# The share of tests that start whole jobs (tests/sampling.py), beside those of what changed; all of them where
# PYTEST_FLAGS select some.
test: export FT_TEST_SHARE ?= $(if $(PYTEST_FLAGS),1,0.3)
test: $(INSTALLED)
	$(BIN)/python -m pytest -m "not slow" $(PARALLEL) $(PYTEST_FLAGS)

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow $(PYTEST_FLAGS)

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy scripts tests
	$(BIN)/python -m pytest --quiet tests/test_architecture.py tests/test_project.py tests/ft_launcher/record/test_events.py \
		tests/ft_launcher/tools/bundle/test_allowed.py

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(INSTALLED)
	$(BIN)/python -m scripts.docs.journal_events

pictures: $(INSTALLED)
	$(BIN)/python -m scripts.docs.page_pictures

bench: $(INSTALLED)
	$(BIN)/python -m scripts.bench

clean:
	rm -rf .venv .venv-torch-* .venv-frameworks .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist demo_out bench_out
