# `make demo` and `make test` are all a fresh machine with Python and a C++ compiler needs.

SHELL := /bin/bash
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
# One more than there are cores: tests that wait for processes and timers leave some of two cores idle.
JOBS ?= 3
PYTEST_ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -q
# With the torch that is installed in place of the pinned one, once it is.
INSTALL := $(PIP) install -c $$(ls $(VENV)/constraints.txt 2>/dev/null || echo constraints.txt)
STAMP := $(VENV)/.stamp
DEEPSPEED := $(VENV)/.deepspeed

# The CPU build by its full version, so that pip can never choose the CUDA build and its gigabytes of libraries.
# With a GPU: make venv TORCH=torch==X.Y.Z
TORCH ?= torch==$(shell sed -n 's/^torch==//p' constraints.txt)+cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# DeepSpeed compiles an op on its first use. The cache lives in the environment that the op was compiled against:
# a cache shared by two environments would be rebuilt at each change of sides, under the feet of running processes.
OPS := ShareMemCommBuilder CPUAdamBuilder AsyncIOBuilder FusedAdamBuilder CPUAdagradBuilder CPULionBuilder
OTHER_DEEPSPEEDS := 0.18.9 0.19.5
# Likewise one ninja: versions that differ rebuild one another's work.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/$(VENV)/torch_extensions
export DS_ACCELERATOR ?= cpu
export OMP_NUM_THREADS ?= 1
# Tests and measurements start processes by the hundreds, each of which would compile the package for itself.
unexport PYTHONDONTWRITEBYTECODE
# Nor do users have this one: what is written late fails late.
unexport PYTHONUNBUFFERED

NATIVE_SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' 2>/dev/null)

.PHONY: help venv warm versions front-ends man docs docs-serve docs-test reference dist dist-aarch64 release-check demo demo-elastic demo-elastic-netns demo-elastic-fixed test test-all sweep coverage deepspeed-faults test-gpu test-native native-tests compiled-tests \
    crash crash-training crash-memory bench-memory damage faults fuzz lifecycle bench bench-gpu gpu-wheels gpu-check figures bench-scale support sizes lint format clean

help:
	@echo "make demo      the demonstration; its results go to demo/"
	@echo "make demo-elastic  a job that loses and gains nodes; its results go to demo-elastic/"
	@echo "make demo-elastic-netns  one of whose hosts is cut off; needs root; results in demo-elastic-netns/"
	@echo "make demo-elastic-fixed  of a fixed size, which waits; its results go to demo-elastic-fixed/"
	@echo "make test      the tests, in minutes (PYTEST_ARGS='-k name' narrows, JOBS sets the number of workers)"
	@echo "               SINCE=main adds all tests of what has changed since that commit"
	@echo "make test-all  all tests: also more pairs of sizes, older DeepSpeeds, demos, benchmarks, short campaigns"
	@echo "make sweep     more cases of what make test-all shows: topologies, Universal Checkpoint, crashes"
	@echo "make coverage  branch coverage of make test-all, rank processes included, as coverage/coverage.json"
	@echo "make deepspeed-faults  faults of the installed DeepSpeed, reproduced without zeroelastic"
	@echo "make test-gpu  the tests that need a CUDA device"
	@echo "make test-native  the C++ tests, with sanitizers"
	@echo "make bench     the benchmarks; needs a quiet machine"
	@echo "make bench-gpu  kernels, files to a GPU and back, whole saves and loads; needs a GPU and nvcc"
	@echo "make gpu-check  tests and measurements on a borrowed GPU, without network; make gpu-wheels prepares it"
	@echo "make figures   the figures of the README and the pages, from the raw results"
	@echo "make crash     kill -9 at random moments of a reshard"
	@echo "make crash-training  kill -9 at 200 random moments of a training job that saves"
	@echo "make crash-memory  kill -9 at 200 random moments of a job that keeps checkpoints in memory"
	@echo "make bench-memory  what checkpoints in memory cost training, and loads from them; needs a quiet machine"
	@echo "make lifecycle  thousands of actions on real engines, each compared with a model"
	@echo "make fuzz      fuzzes every reader of files, FUZZ_SECONDS=600 each (FUZZ_TARGETS='pickle table' narrows)"
	@echo "make bench-scale  headers and records of many parameters and ranks; needs a quiet machine"
	@echo "make front-ends  TRL, LLaMA-Factory and others, unchanged, on 2 -> 3 -> 1 ranks"
	@echo "make faults    puts 40 faults into the code, one at a time: a test has to find each"
	@echo "make damage    a thousand flipped bits and other damage, each judged by a load"
	@echo "make dist      a source distribution and a wheel for every Python and most Linux systems, in dist/"
	@echo "make dist-aarch64  the wheel for ARM servers, cross-compiled, its C++ tests in an emulator"
	@echo "make release-check  what has to hold before a release is tagged (RELEASING.md)"
	@echo "make man       man pages from the text of --help, in man/"
	@echo "make docs      the documentation as a site, in site/; a warning is an error"
	@echo "make docs-test  runs every block of code of every page, and compares what it prints with the page"
	@echo "make docs-serve  the same, served on this machine and built again whenever a page changes"
	@echo "make reference  what pages take from the code: options of verbs and runs, drawings, JSON Schemas"
	@echo "make lint      ruff, mypy --strict, clang-format; changes nothing"
	@echo "make support   docs/support.md, from the marks on the tests"
	@echo "make sizes     lines and files of each package, of tests, benchmarks and C++"
	@echo "make format    ruff and clang-format, in place"
	@echo "make venv      the environment in $(VENV)"
	@echo "make versions  older DeepSpeed versions, for the tests"
	@echo "make warm      DeepSpeed's CPU ops, compiled once"
	@echo "make clean     removes the environment, builds and caches"

venv: $(STAMP)

# DeepSpeed is built from source by a setup.py that imports torch, hence the order and --no-build-isolation.
# A torch wheel at hand (pip's find-links) is taken before an index is asked.
$(DEEPSPEED): constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else "Python 3.10 or newer is needed: make PYTHON=python3.12")'
	@echo "Setting up $(VENV); the first time takes a few minutes."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --no-deps --no-index $(TORCH) 2>/dev/null \
	    || $(PIP) install --no-deps --extra-index-url $(TORCH_INDEX) $(TORCH)
	@$(PIP) freeze | sed -n 's/^torch==\([0-9.]*\).*/s;^torch==.*;torch==\1;/p' | sed -f - constraints.txt >$(VENV)/constraints.txt
	@$(INSTALL) torch numpy setuptools wheel packaging ninja psutil py-cpuinfo pydantic
	@DS_BUILD_OPS=0 $(INSTALL) --no-build-isolation deepspeed
	@touch $@

# Everything else, while DeepSpeed's ops compile where make may run two jobs. Bytecode is left to what imports a module:
# compiling all of transformers, moto and others takes a minute, and the tests import a small part.
$(STAMP): $(DEEPSPEED) pyproject.toml setup.py
	@ZEROELASTIC_BUILD_CUDA=$(if $(shell command -v nvcc),1,0) $(INSTALL) --no-compile --no-build-isolation -e '.[train,demo,dev]'
	@$(PIP) check
	@touch $@

warm: $(STAMP) $(OPS:%=$(VENV)/.op-%)

# An op that this machine cannot build is left out, as DeepSpeed itself leaves it out. A compilation that was killed leaves
# a lock on which the next would wait until its time is up.
$(VENV)/.op-%: $(DEEPSPEED)
	@find $(TORCH_EXTENSIONS_DIR) -name lock -mmin +20 -delete 2>/dev/null || true
	@echo "Compiling DeepSpeed's $* (once)."
	@PATH="$(CURDIR)/tests/compilers:$$PATH" timeout 1200 $(PY) -c 'import sys; \
	    from deepspeed.accelerator import get_accelerator; \
	    builder = get_accelerator().create_op_builder(sys.argv[1]); \
	    builder is not None and builder.is_compatible() and builder.load()' $*
	@touch $@

# Other DeepSpeed versions, each in a folder of its own beside the environment's.
versions: $(OTHER_DEEPSPEEDS:%=$(VENV)/deepspeed-%/.stamp)

$(VENV)/deepspeed-%/.stamp: $(STAMP)
	@DS_BUILD_OPS=0 $(PIP) install --no-compile --no-deps --no-build-isolation --upgrade --target $(VENV)/deepspeed-$* deepspeed==$*
	@touch $@

# Front ends that train with DeepSpeed, each in an environment of its own, with pinned packages, beside the development
# environment. The tests need TRL alone.
FRONT_ENDS := trl llamafactory ms-swift openrlhf ray

$(VENV)/front-ends/%/.stamp: $(STAMP) tests/front_ends/requirements/%.txt tests/front_ends/environments.py
	@rm -rf $(@D)
	@$(PY) tests/front_ends/environments.py $(VENV)/front-ends $*

# Each on 2 -> 3 -> 1 ranks; the raw result goes to benchmarks/results. ARGS='--only TRL' chooses.
front-ends: $(FRONT_ENDS:%=$(VENV)/front-ends/%/.stamp) warm
	$(VENV)/front-ends/ray/bin/python tests/front_ends/ray_workers.py
	$(PY) tests/front_ends/run.py --out benchmarks/results $(ARGS)

# From the text of --help; the wheel has them.
man: $(STAMP)
	@rm -rf man
	@$(PY) docs/make_man.py man

# The pages of docs as a site that needs no network (docs/tools/stage.py, zensical.toml).
docs: $(STAMP)
	@$(PY) docs/tools/build_site.py build

docs-serve: $(STAMP)
	@$(PY) docs/tools/build_site.py serve

# What stands in pages and is made from the code; tests/project/test_pages.py and tests/cli compare.
reference: $(STAMP)
	@$(PY) docs/tools/reference.py
	@$(PY) docs/tools/drawings.py

# The wheel is built from the source distribution, so that this has all it takes. auditwheel gives it its tag, and
# refuses where the library needs a newer C or C++ library than the tag says. The CUDA engine is not in it:
# `zeroelastic doctor --build-cuda` compiles it where it is used.
DIST := dist/.stamp
DIST_PLATFORM ?= manylinux_2_28_$(shell uname -m)
PACKAGE_FILES := $(shell find zeroelastic -name '*.py' -o -name py.typed)

dist: $(DIST)

$(DIST): $(STAMP) $(PACKAGE_FILES) $(NATIVE_SOURCES) setup.py pyproject.toml MANIFEST.in README.md docs/make_man.py
	@rm -rf dist && mkdir dist
	@$(MAKE) --no-print-directory man
	@CXXFLAGS= LDFLAGS= ZEROELASTIC_BUILD_NATIVE=1 ZEROELASTIC_BUILD_CUDA=0 \
	    $(PY) -m build --no-isolation --outdir dist >dist/build.log 2>&1 || { tail -n 30 dist/build.log; exit 1; }
	@$(PY) -m auditwheel repair --only-plat --plat $(DIST_PLATFORM) --wheel-dir dist dist/*-linux_*.whl \
	    >>dist/build.log 2>&1 || { tail -n 30 dist/build.log; exit 1; }
	@rm dist/*-linux_*.whl
	@ls dist/*.whl dist/*.tar.gz
	@touch $@

# The wheel for ARM servers, compiled on this machine (Debian: g++-aarch64-linux-gnu, qemu-user-static). auditwheel says
# what the library needs of a system; the C++ tests run in an emulator.
AARCH64_CXX ?= aarch64-linux-gnu-g++
AARCH64_RUN ?= qemu-aarch64-static -L /usr/aarch64-linux-gnu

dist-aarch64: $(DIST)
	@rm -rf build dist/*aarch64.whl
	@CXX="$(AARCH64_CXX)" CXXFLAGS= LDFLAGS= ZEROELASTIC_BUILD_NATIVE=1 ZEROELASTIC_BUILD_CUDA=0 \
	    $(PY) -m build --no-isolation --wheel -C--build-option=--plat-name=linux_aarch64 --outdir dist \
	    >dist/build-aarch64.log 2>&1 || { tail -n 30 dist/build-aarch64.log; exit 1; }
	@rm -rf build
	@$(PY) -m auditwheel show dist/*-linux_aarch64.whl 2>&1 | tee -a dist/build-aarch64.log \
	    | grep -qE '"manylinux_2_(17|2[0-8])_aarch64"' || { tail -n 20 dist/build-aarch64.log; exit 1; }
	@$(PY) -m wheel tags --remove --platform-tag manylinux_2_28_aarch64 dist/*-linux_aarch64.whl
	$(MAKE) -C csrc test BUILD=build/aarch64 CXX="$(AARCH64_CXX)" TIME_LIMIT="timeout 1800 $(AARCH64_RUN)"

release-check: $(STAMP)
	@$(PY) tools/release_check.py

demo: $(STAMP) $(VENV)/.op-ShareMemCommBuilder
	$(PY) examples/demo.py --out demo

# Four torchrun agents on this machine, of which some are killed and others come; its results go to demo-elastic/.
demo-elastic: $(STAMP) $(VENV)/.op-ShareMemCommBuilder
	$(PY) examples/elastic/cluster.py --out demo-elastic --results benchmarks/results

demo-elastic-netns: $(STAMP) $(VENV)/.op-ShareMemCommBuilder
	$(PY) examples/elastic/cluster.py --out demo-elastic-netns --scenario network --results benchmarks/results

demo-elastic-fixed: $(STAMP) $(VENV)/.op-ShareMemCommBuilder
	$(PY) examples/elastic/cluster.py --out demo-elastic-fixed --scenario fixed-size --results benchmarks/results

# Tests of a file stay together, in order, until a worker runs out of work and takes over the last half of another's.
PYTEST := $(PY) -m pytest -q -n $(JOBS) --dist worksteal

# Every promise once; what is marked `extended` (tests/extended.py) runs in test-all. With SINCE=COMMIT, also the extended
# tests of what has changed since.
test: warm
	$(PYTEST) -m "not sweep and (not extended or touched)" $(if $(SINCE),--touched-since=$(SINCE)) --few-examples \
	    $(PYTEST_ARGS) tests

# Every block of code of every page runs, and prints what the page shows.
docs-test: warm
	$(PYTEST) $(PYTEST_ARGS) tests/project/test_docs.py tests/integrations/test_frameworks.py -k "docs or documentation"
	$(PYTEST) $(PYTEST_ARGS) tests/verbs/test_examples.py

test-all: warm versions dist $(VENV)/front-ends/trl/.stamp
	$(PYTEST) -m "not sweep" $(PYTEST_ARGS) tests

sweep: warm
	$(PYTEST) -m sweep $(PYTEST_ARGS) tests

# Every process of a test measures itself, the ranks too; coverage/report.txt has a line for each file.
coverage: warm versions dist $(VENV)/front-ends/trl/.stamp
	rm -rf coverage && mkdir coverage
	status=0; export COVERAGE_FILE=$(CURDIR)/coverage/data; \
	    $(PY) -m coverage run -m pytest -q -n $(JOBS) --dist worksteal $(PYTEST_ARGS) tests || status=$$?; \
	    $(PY) -m coverage combine -q && $(PY) -m coverage json -q -o coverage/coverage.json && \
	    $(PY) -m coverage report >coverage/report.txt; tail -n 1 coverage/report.txt; exit $$status

deepspeed-faults: warm
	$(PY) examples/deepspeed_faults/run.py | tee benchmarks/results/deepspeed_faults.txt

test-gpu: $(STAMP)
	DS_ACCELERATOR=cuda $(PY) -m pytest -q -m gpu $(PYTEST_ARGS) tests

# The C++ tests, plainly and under the address, undefined-behaviour and thread sanitizers.
test-native:
	$(MAKE) -j$(JOBS) -C csrc test asan tsan

# The bytecode of the tests with pytest's assertions, made once: workers that start together make it each for itself.
compiled-tests: $(STAMP)
	@$(PY) -m pytest -q --collect-only tests >/dev/null

# What the tests in Python run of them, compiled ahead: it needs no environment.
native-tests:
	@$(MAKE) -s -C csrc build/asan/native build/asan/cuda-engine build/fake/_cuda.so

# Kills reshard at random moments; the raw result goes to benchmarks/results.
crash: $(STAMP)
	$(PY) benchmarks/crash_reshard.py --kills 50 --out benchmarks/results
	$(PY) benchmarks/crash_reshard.py --kills 50 --stages 3 2 --out benchmarks/results
	$(PY) benchmarks/crash_reshard.py --kills 25 --stages 2 3 --out benchmarks/results

faults: warm
	$(PY) benchmarks/faults.py --out benchmarks/results/faults.json

crash-training: $(STAMP)
	$(PY) benchmarks/crash_training.py --kills 200 --out benchmarks/results
	$(PY) benchmarks/crash_training.py --stage 2 --kills 60 --out benchmarks/results

crash-memory: $(STAMP) $(VENV)/.op-ShareMemCommBuilder
	$(PY) benchmarks/crash_memory.py --kills 200 --out benchmarks/results

bench-memory: $(STAMP) $(VENV)/.op-ShareMemCommBuilder
	$(PY) benchmarks/bench_memory.py --out benchmarks/results

# Saves, loads, kills and tools in any order, compared with a model; the raw results go to benchmarks/results.
lifecycle: warm
	$(PY) tests/lifecycle/campaign.py --actions 2000 --seed 1 --out benchmarks/results
	$(PY) tests/lifecycle/campaign.py --stage 2 --actions 400 --seed 1 --out benchmarks/results
	$(PY) tests/lifecycle/campaign.py --programs 300 --seed 1 --out benchmarks/results

# Readers under atheris, the C++ engine under libFuzzer (clang); the raw result goes to benchmarks/results.
FUZZ_SECONDS ?= 600
FUZZ_TARGETS ?=
FUZZ_SEED ?= 1
fuzz: $(STAMP)
	@$(INSTALL) -e '.[fuzz]' --no-build-isolation
	$(PY) tests/fuzz/campaign.py --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED) --targets '$(FUZZ_TARGETS)' \
	    --out benchmarks/results

# Many parameters and ranks; the raw result goes to benchmarks/results.
bench-scale: $(STAMP)
	$(PY) benchmarks/bench_scale.py --out benchmarks/results

# Damages a checkpoint and loads it, again and again; the raw result goes to benchmarks/results.
damage: warm
	$(PY) benchmarks/damage.py --flips 1000 --truncations 200 --seed 0 --out benchmarks/results
	$(PY) benchmarks/damage.py --stage 2 --flips 400 --truncations 80 --seed 0 --out benchmarks/results
	$(PY) benchmarks/damage.py --slices AutoTP --flips 300 --truncations 60 --seed 0 --out benchmarks/results
	$(PY) benchmarks/damage.py --slices MoE --stage 2 --flips 300 --truncations 60 --seed 0 --out benchmarks/results

# Needs a quiet machine; raw results go to benchmarks/results.
bench: $(STAMP)
	$(PY) benchmarks/bench_kernel.py --out benchmarks/results
	$(PY) benchmarks/bench_load.py --out benchmarks/results
	$(PY) benchmarks/bench_save.py --out benchmarks/results
	$(PY) benchmarks/figures.py

# On a machine with a GPU and nvcc; raw results go to benchmarks/results.
bench-gpu: $(STAMP)
	$(PY) -m zeroelastic doctor --build-cuda
	$(PY) benchmarks/bench_gpu.py --out benchmarks/results
	$(PY) benchmarks/bench_gpu_files.py --out benchmarks/results
	$(PY) benchmarks/bench_gpu_resume.py --out benchmarks/results
	$(PY) benchmarks/gpu_features.py --out benchmarks/results
	$(PY) benchmarks/bench_gpu_saves.py --out benchmarks/results

# What Python lacks on a borrowed machine with a GPU, as wheels for that Python, and DeepSpeed as a wheel without
# compiled ops; libaio as Debian packages, where apt has them, for DeepSpeed's NVMe offload. tools/gpu_check.sh takes
# all of it from there.
GPU_WHEELS ?= .whl
GPU_PYTHON ?= 3.12
GPU_NEEDS := pydantic pydantic-core annotated-types typing-inspection typing-extensions hjson

gpu-wheels: $(DEEPSPEED)
	@rm -rf $(GPU_WHEELS) && mkdir -p $(GPU_WHEELS)
	@DS_BUILD_OPS=0 $(PIP) wheel --no-deps --no-build-isolation -w $(GPU_WHEELS) "$$(grep '^deepspeed==' constraints.txt)"
	@$(PIP) download --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) --implementation cp \
	    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
	    -d $(GPU_WHEELS) $(foreach name,$(GPU_NEEDS),"$$(grep '^$(name)==' constraints.txt)")
	@cd $(GPU_WHEELS) && apt-get -qq download libaio-dev libaio1 2>/dev/null \
	    || echo "libaio is left out: DeepSpeed's NVMe offload is not checked where it is not installed."
	@ls -s $(GPU_WHEELS)

# Tests and measurements on a machine that is borrowed for minutes, without network and virtual environment.
GPU_OUT ?= benchmarks/results/gpu
gpu-check:
	tools/gpu_check.sh --out $(GPU_OUT) $(ARGS)

# The figures of the README and the pages, from the raw results; tests/project/test_pages.py compares.
figures: $(STAMP)
	$(PY) benchmarks/figures.py

# What the tests show, as a table; tests/project/test_support.py compares.
support: $(STAMP)
	$(PY) -m pytest -q --collect-only --support-table docs/support.md tests >/dev/null

sizes:
	@$(PYTHON) tools/sizes.py

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy --strict
	$(if $(NATIVE_SOURCES),$(VENV)/bin/clang-format --dry-run -Werror $(NATIVE_SOURCES))

format: $(STAMP)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(if $(NATIVE_SOURCES),$(VENV)/bin/clang-format -i $(NATIVE_SOURCES))

clean:
	rm -rf $(VENV) build dist man site *.egg-info demo demo-elastic demo-elastic-netns demo-elastic-fixed coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
