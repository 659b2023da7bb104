# Each command does its own set-up: .venv is made once and kept while requirements.txt and pyproject.toml are unchanged.

PYTHON ?= python3
SEEDS ?= 1
CONFIG ?= configs/demo.yaml
ARGS ?=
# Which GPUs train: of this machine (empty: all), and on several machines which one this is and where the first one is.
GPUS ?=
NODES ?= 1
NODE_RANK ?= 0
MAIN_ADDRESS ?=
MAIN_PORT ?=
ADAPTER ?=
OUT ?=
RUNS ?=
QUICK ?=
ONLY ?=
JOBS ?= 2
BENCH ?= bfcl
SOURCE ?=
NAME ?=
TOOLS ?= python

VENV := .venv/bin/python
LAUNCH = $(VENV) -m envace.launch $(if $(GPUS),--gpus $(GPUS)) --nodes $(NODES) --node-rank $(NODE_RANK) \
	$(if $(MAIN_ADDRESS),--main-address $(MAIN_ADDRESS)) $(if $(MAIN_PORT),--main-port $(MAIN_PORT))
# Idle threads sleep. Spinning, the default, makes a tiny model several times slower wherever the cores are shared.
export OMP_WAIT_POLICY := PASSIVE
# Two processes, each with whole files, as what a file sets up is used by all its tests.
IN_PARALLEL := --numprocesses 2 --dist loadfile
# The name of the stamp holds the hash, so that an old set-up is simply a file that does not exist.
STAMP := .venv/installed-$(shell cat requirements.txt pyproject.toml | sha256sum | cut -c1-16)

.DEFAULT_GOAL := help
.PHONY: help setup demo ablations dynamics tts test test-fast sft rl eval tables report serve bench bench-verify doctor \
	merge new-env lint

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## install into .venv; every other command does this by itself
	@echo 'Ready: .venv'

demo: $(STAMP)  ## warm-up, RL in rehearsal, real evaluation on an embedded world (SEEDS=1)
	@$(VENV) -m envace.demo --seeds $(SEEDS) $(ARGS)

ablations: $(STAMP)  ## every variant against EnvACE, goes on where it stopped (SEEDS=5 ONLY=a,b JOBS=2; QUICK=1: a check)
	@$(VENV) -m envace.ablations --jobs $(JOBS) $(if $(QUICK),--quick) $(if $(ONLY),--only $(ONLY)) \
		$(if $(filter-out file,$(origin SEEDS)),--seeds $(SEEDS)) $(ARGS)

dynamics: $(STAMP)  ## evaluate the models that a training exported, over its steps (CONFIG=... ARGS="...")
	@$(VENV) -m envace.dynamics --config $(CONFIG) $(ARGS)

tts: $(STAMP)  ## private rehearsal at test time: modes, numbers, who rehearses (ARGS="--numbers 0,2,4"; QUICK=1)
	@$(VENV) -m envace.tts $(if $(QUICK),--quick) $(ARGS)

test: $(STAMP)  ## every test
	@$(VENV) -m pytest $(IN_PARALLEL)

test-fast: $(STAMP)  ## the tests for daily work
	@$(VENV) -m pytest $(IN_PARALLEL) -m "not slow"

sft: $(STAMP)  ## supervised warm-up on all GPUs (CONFIG=configs/demo.yaml ARGS="sft.steps=10" GPUS=N)
	@$(LAUNCH) train_sft.py --config $(CONFIG) $(ARGS)

rl: $(STAMP)  ## reinforcement learning, same settings (on each of M machines: NODES=M NODE_RANK=R MAIN_ADDRESS=IP)
	@$(LAUNCH) train_rl.py --config $(CONFIG) $(ARGS)

eval: $(STAMP)  ## evaluation (CONFIG=... ARGS="...")
	@$(VENV) evaluate.py --config $(CONFIG) $(ARGS)

tables: $(STAMP)  ## the paper's tables and figures, published and ours (RUNS="runs/a runs/b" ARGS="--name runs/a=EnvACE-8B")
	@$(VENV) -m envace.tables $(RUNS) $(if $(OUT),--out $(OUT)) $(ARGS)

report: $(STAMP)  ## runs as one HTML page: curves, settings, trajectories (RUNS="runs/a runs/b" OUT=report.html)
	@$(VENV) -m envace.report $(RUNS) $(if $(OUT),--out $(OUT)) $(ARGS)

serve: $(STAMP)  ## an OpenAI-compatible endpoint over a checkpoint (CONFIG=... ARGS="model.path=FOLDER serve.port=8000")
	@$(VENV) -m envace.serve --config $(CONFIG) $(ARGS)

bench-setup-%: $(STAMP)  ## put an official harness in .bench: bench-setup-bfcl, -tau2, -vita, -finmcp, -trl (SOURCE=its checkout)
	@$(VENV) -m envace.benchmarks.setup $* $(if $(SOURCE),--source $(SOURCE)) $(ARGS)

bench-verify: $(STAMP)  ## gold actions and doing nothing through an official harness (BENCH=bfcl ARGS="--tasks 5")
	@$(VENV) -m envace.benchmarks.verify $(BENCH) $(ARGS)

bench: $(STAMP)  ## this code against TRL and against the plain way (make bench-setup-trl first; ARGS="step kv")
	@$(VENV) -m bench $(ARGS)

doctor: $(STAMP)  ## check machine, config, model and memory before a long run (CONFIG=... ARGS="...")
	@$(VENV) -m envace.doctor --config $(CONFIG) $(ARGS)

merge: $(STAMP)  ## adapters and their base as one model (ADAPTER=runs/x/rl OUT=runs/x/merged)
	@$(VENV) -m envace.merge $(ADAPTER) $(OUT) $(ARGS)

new-env: $(STAMP)  ## a template of an executable environment of your own (NAME=my_shop TOOLS=python|mcp)
	@$(VENV) -m envace.custom '$(NAME)' --tools '$(TOOLS)' $(ARGS)

lint: $(STAMP)  ## ruff (rules and format) and mypy
	@$(VENV) -m ruff check .
	@$(VENV) -m ruff format --check .
	@$(VENV) -m mypy

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'error: EnvACE needs Python 3.11 or newer as $(PYTHON); name another with PYTHON=python3.12' >&2; exit 1; }
	@test -x .venv/bin/pip || $(PYTHON) -m venv .venv
	@echo 'Installing into .venv, once; this takes a few minutes.'
	@$(VENV) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@$(VENV) -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@rm -f .venv/installed-*
	@touch $@
