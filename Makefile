# For a fresh clone, run `make demo` and `make test`. The first call creates .venv. Later calls install nothing.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
INSTALLED := .venv/.installed
TESTS_INSTALLED := .venv/.installed_tests
DOCS_INSTALLED := .venv/.installed_docs
LOCK_INSTALLED := .venv/.installed_lock
PAGES := README.md CONTRIBUTING.md CHANGELOG.md SECURITY.md LICENSE docs slurm/README.md deploy/kube deploy/sky.yaml deploy/Dockerfile benchmarks/README.md benchmarks/results tests/project/seeds.md tests/model/golden/README.md \
	$(wildcard vit/*.py vit/distributed/exact/*.py benchmarks/*.py)
# Number of ranks of the demo. launch/demo.sh chooses the default.
RANKS ?=
# One more than two cores, because tests wait for processes, signals and servers a third of the time.
TESTS_AT_ONCE ?= 3
AT_ONCE = $(BIN)/python -m pytest --numprocesses=$(TESTS_AT_ONCE) --dist=loadfile --no-loadscope-reorder

.PHONY: install demo test test-all lint check soak fuzz gpu-check lease-kit lock audit docs pictures release clean

install: $(INSTALLED)

demo: $(INSTALLED)
	@RANKS=$(RANKS) bash launch/demo.sh

test: $(TESTS_INSTALLED)
	$(AT_ONCE) -m "not full"

# Runs `test`, and then more kills and seeds, full-size models, all CPU kernels and Slurm.
test-all: test
	$(AT_ONCE) -m full --ignore=tests/slurm
	$(BIN)/python -m pytest tests/slurm  # without other tests, because its jobs have time limits of seconds

# Checks style, format and types. The first call takes a minute, later calls take seconds.
lint: $(TESTS_INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint
	$(AT_ONCE) -m "not slow and not full"

# Tests kills, signals, stops and leaks, with one line each, in less than an hour on two cores. COUNT is the number of kills. PARTS selects parts.
soak: $(TESTS_INSTALLED)
	$(BIN)/python tests/faults/soak.py $(if $(COUNT),--count $(COUNT)) $(if $(PARTS),--parts $(PARTS))

# Kills and resumes runs with random settings and ranks for MINUTES. Each line has the command to repeat it. OUT receives JSON lines.
fuzz: $(TESTS_INSTALLED)
	$(BIN)/python tests/faults/fuzz.py $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED)) $(if $(OUT),--out $(OUT))

# Tests every guarantee on this machine's GPUs in at most ten minutes. Writes to benchmarks/results.
gpu-check: $(INSTALLED)
	$(BIN)/python benchmarks/gpu_check/check.py

# Gathers wheels and as many of IMAGES (folders train/ and test/) as fit into 52 MiB in build/lease, for benchmarks/gpu_check/lease.sh.
lease-kit: $(INSTALLED)
	$(BIN)/python benchmarks/gpu_check/kit.py "$(IMAGES)"

# Writes deploy/requirements.lock, which lists all packages of all extras with file hashes, for `pip install --require-hashes`, and their licenses to docs/licenses.md.
lock: $(LOCK_INSTALLED)
	$(BIN)/uv pip compile pyproject.toml --all-extras --universal --python-version 3.11 --generate-hashes --no-annotate --default-index https://pypi.org/simple --custom-compile-command "make lock" --quiet -o deploy/requirements.lock
	$(BIN)/python docs/licenses.py

# Lists known vulnerabilities of the locked packages. Needs PyPI's own service, because mirrors lack the data.
audit: $(LOCK_INSTALLED)
	$(BIN)/pip-audit --requirement deploy/requirements.lock --require-hashes --disable-pip

$(LOCK_INSTALLED): $(INSTALLED)
	$(PIP) -e .[lock]
	@touch $@

# Builds the pages as a site in build/site. It keeps the repository's paths, so links work in both. A broken link is an error.
docs: $(DOCS_INSTALLED)
	rm -rf build/pages build/site
	mkdir -p build/pages
	tar cf - --exclude=mkdocs.yml $(PAGES) | tar xf - -C build/pages
	$(BIN)/python docs/reference.py build/pages/docs/reference
	cp docs/mkdocs.yml build/mkdocs.yml
	$(BIN)/zensical build --clean --strict --config-file build/mkdocs.yml
	$(BIN)/python tests/project/check_site.py build/site
	@echo "docs: $(BIN)/python -m http.server --directory build/site, then open http://localhost:8000"

# Remakes the pictures in docs/images from the runs of `make demo`. Needs Chromium.
pictures: $(TESTS_INSTALLED)
	$(BIN)/python docs/pictures.py

$(DOCS_INSTALLED): $(INSTALLED)
	$(PIP) -e .[docs]
	@touch $@

# Builds wheel, sdist, site and the demo's weights in build/release/VERSION, and tags the commit: make release VERSION=0.2.0. Publishes nothing.
release: $(TESTS_INSTALLED) $(DOCS_INSTALLED)
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash .github/release.sh "$(VERSION)"

$(INSTALLED): requirements.txt pyproject.toml setup.py $(wildcard vit/data/decode/c/*)
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed, and none was found: install it, or name it with make PYTHON=/path/to/python3"; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) lacks venv: install it (Debian, Ubuntu: apt-get install python3-venv), then run make again"; exit 2; }
	@printf '%s\n' "Installing into .venv, once. pip prints nothing for minutes: with PyPI's torch for GPUs it downloads 3.1 GB (6 GB on the disk)." \
		"Without a GPU a tenth of that is enough: Ctrl-C, export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu, and make again."
	$(PYTHON) -m venv .venv
	$(PIP) -r requirements.txt
	@touch $@

$(TESTS_INSTALLED): requirements-dev.txt $(INSTALLED)
	$(PIP) -r requirements-dev.txt
	@touch $@

clean:
	rm -rf .venv data/digits runs/demo runs/demo_finetune
