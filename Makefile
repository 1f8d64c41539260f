# Two commands from a fresh clone: `make demo` and `make test`. Each makes .venv on its first call; later calls install nothing.
# CPU-only wheels on a laptop:  export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu   before the first call.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
INSTALLED := .venv/.installed
DOCS_INSTALLED := .venv/.installed_docs
LOCK_INSTALLED := .venv/.installed_lock
PAGES := README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md docs notebooks slurm/README.md kube sky benchmarks/README.md benchmarks/results \
	CITATION.cff $(wildcard vit/model.py vit/step.py vit/train.py)
RANKS ?= 2
# One more than two cores: tests also wait for processes, signals and servers, a third of their time.
TESTS_AT_ONCE ?= 3
AT_ONCE = $(BIN)/python -m pytest --numprocesses=$(TESTS_AT_ONCE) --dist=loadfile --no-loadscope-reorder

.PHONY: demo test test-all lint check soak gpu-check lock audit docs clean

demo: $(INSTALLED)
	@RANKS=$(RANKS) bash launch/demo.sh

test: $(INSTALLED)
	$(AT_ONCE) -m "not full"

# What only repeats: more kills and seeds, full-size models, all kernels of the CPU, Slurm.
test-all: test
	$(AT_ONCE) -m full --ignore=tests/slurm
	$(BIN)/python -m pytest tests/slurm  # alone: its jobs have time limits of seconds

# Seconds: style, format, types. Pre-commit and CI call the same programs.
lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint
	$(AT_ONCE) -m "not slow and not full"

# Kills, signals, stops and leaks in numbers, one line each: under an hour on two cores. COUNT is the number of kills; PARTS chooses.
soak: $(INSTALLED)
	$(BIN)/python tests/faults/soak.py $(if $(COUNT),--count $(COUNT)) $(if $(PARTS),--parts $(PARTS))

# Every promise on this machine's GPUs, with its number: ten minutes at most. Writes to benchmarks/results.
gpu-check: $(INSTALLED)
	$(BIN)/python launch/gpu_check.py

# requirements.lock: every package of every extra, with the hashes of its files, for `pip install --require-hashes`.
lock: $(LOCK_INSTALLED)
	$(BIN)/uv pip compile pyproject.toml --all-extras --universal --python-version 3.11 --generate-hashes --no-annotate --default-index https://pypi.org/simple --custom-compile-command "make lock" --quiet -o requirements.lock

# Known vulnerabilities of what is locked; needs PyPI's own service, which mirrors lack.
audit: $(LOCK_INSTALLED)
	$(BIN)/pip-audit --requirement requirements.lock --require-hashes --disable-pip

$(LOCK_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .[lock]
	@touch $@

# The pages as a site in build/site; a link that leads nowhere is an error. Same paths as here, so the same links work.
docs: $(DOCS_INSTALLED)
	rm -rf build/pages build/site
	mkdir -p build/pages
	tar cf - $(PAGES) | tar xf - -C build/pages
	$(BIN)/zensical build --clean --strict
	@echo "docs: build/site/index.html"

$(DOCS_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .[docs]
	@touch $@

$(INSTALLED): requirements.txt pyproject.toml setup.py $(wildcard vit/data/decode/c/*)
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed, and none was found: install it, or name it with make PYTHON=/path/to/python3"; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) lacks venv: install it (Debian, Ubuntu: apt-get install python3-venv), then run make again"; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

clean:
	rm -rf .venv data/digits runs/demo runs/demo_finetune
