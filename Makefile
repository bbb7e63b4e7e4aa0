# `make` and `make help` list the targets. Most take ARGS: make run ARGS="method=fastv ratio=0.9"
PYTHON ?= python3.11
VENV   ?= .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed-$(shell cat requirements.txt constraints.txt | sha256sum | cut -c1-16)
ARGS   ?=
DEMO   ?= results
NOTEBOOKS ?= notebooks/*.ipynb

# The environment of vLLM, which needs other versions of torch and transformers than VENV.
SERVE_VENV ?= $(VENV)-serve
SERVE_STAMP := $(SERVE_VENV)/.installed-$(shell sha256sum tests/serve/environment.py | cut -c1-16)

# Gradio asks for an older Pillow than constraints.txt has: an environment that adds both to VENV.
EXPLORE_VENV ?= build/explore-venv
EXPLORE_STAMP := $(EXPLORE_VENV)/.installed-$(shell cat setup.py constraints.txt | sha256sum | cut -c1-16)

# Another such environment: Ray takes 240 MB.
RAY_VENV ?= build/ray-venv
RAY_STAMP := $(RAY_VENV)/.installed-$(shell cat setup.py constraints.txt | sha256sum | cut -c1-16)

.DEFAULT_GOAL := help

.PHONY: help run doctor test test-all serve-environment test-serve test-explore test-ray test-slurm check docs site recipes mutants lint types layers words sizes bench bench-engine bench-select bench-sd bench-decode bench-kv bench-diffusion bench-onepass bench-peers bench-guided bench-gpu rehearsals notebooks pictures demo report train-seedling quickstart sweep clean

$(STAMP): requirements.txt constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt -c constraints.txt
	touch $(STAMP)

help:  ## this list; `make run ARGS="method=fastv ratio=0.9"` gives arguments to a target
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' Makefile | expand -t 19

run: $(STAMP)  ## the default job, or any other with ARGS
	$(PY) run.py $(ARGS)

doctor: $(STAMP)  ## can this machine run it, and does it compute what it should?
	$(PY) -m espalier doctor $(ARGS)

test: $(STAMP)  ## the everyday run; CI adds ARGS="-m 'slow and not exhaustive'"
	$(PY) -m pytest -q -n 2 --dist worksteal $(ARGS)

test-all: $(STAMP)  ## every test, before a release
	$(PY) -m pytest -q -n 2 --dist worksteal -m "" $(ARGS)

test-slurm: $(STAMP)  ## sweeps through a real SLURM, installed if it is missing and started in a folder of its own
	$(PY) -m pytest -q -x tests/slurm/sweeps.py $(ARGS)

# Its name has the hash of what it is made from, so that a new clone does not install again.
$(SERVE_STAMP): | $(STAMP)
	$(PY) -m tests.serve.environment $(SERVE_VENV) $(SERVE_VLLM)
	touch $@

serve-environment: $(SERVE_STAMP)  ## vLLM for processors: 6 GB in an environment of its own

test-serve: $(SERVE_STAMP)  ## answers of vLLM with the plug-in against the harness's own engine
	$(SERVE_VENV)/bin/python -m tests.serve.names
	SERVE_PYTHON=$(SERVE_VENV)/bin/python $(PY) -m pytest -q -m "" tests/serve/equal_answers.py tests/serve/running_server.py tests/serve/replicas.py tests/serve/benchmark_pairs.py $(ARGS)

lint: $(STAMP)  ## ruff: mistakes and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(STAMP)  ## mypy
	$(PY) -m mypy

layers: $(STAMP)  ## an import only goes down: the order of the packages is in pyproject.toml
	$(VENV)/bin/lint-imports --no-cache

words: $(STAMP)  ## vague names: counts may only fall (lab/house/ceilings.json)
	$(PY) -m lab.house.names --check

sizes: $(STAMP)  ## statements, files, and the files a FastV run enters: figures may only fall (lab/house/ceilings.json)
	$(PY) -m lab.house.sizes --check

$(EXPLORE_STAMP): | $(STAMP)
	$(PY) -m venv --clear $(EXPLORE_VENV)
	$(PY) -c "import sysconfig; print(sysconfig.get_path('purelib'))" > $$(echo $(EXPLORE_VENV)/lib/python3*/site-packages)/venv.pth
	grep -v '^pillow=' constraints.txt > $(EXPLORE_VENV)/constraints.txt
	$(EXPLORE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $$(grep -o 'gradio>=[^"]*' setup.py) -c $(EXPLORE_VENV)/constraints.txt
	touch $@

test-explore: $(EXPLORE_STAMP)  ## the page of `espalier explore`, in a browser where there is one
	$(EXPLORE_VENV)/bin/python -m pytest -q tests/interface/test_explore.py tests/pages/test_explore_browser.py $(ARGS)

$(RAY_STAMP): | $(STAMP)
	$(PY) -m venv --clear $(RAY_VENV)
	$(PY) -c "import sysconfig; print(sysconfig.get_path('purelib'))" > $$(echo $(RAY_VENV)/lib/python3*/site-packages)/venv.pth
	$(RAY_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $$(grep -o 'ray>=[^"]*' setup.py) -c constraints.txt
	touch $@

test-ray: $(RAY_STAMP)  ## sweeps on the workers of a Ray cluster of this machine
	$(RAY_VENV)/bin/python -m pytest -q -m "" tests/cluster/test_remote_workers.py -k ray $(ARGS)

check: lint types layers words test  ## what CI runs, less the tests marked slow and the recipes

# Every model is built without weights, a quarter of a minute. It reads the config file that `docs` writes first.
docs/placement.md: $(wildcard conf/*.csv conf/model/*.yaml conf/base/*.yaml harness/models/*.py harness/models/*/*.py) lab/pages/placement_page.py | $(STAMP)
	$(PY) -m lab.pages.placement_page --write $@

# In one process, since imports would take most of the time.
PAGES := readme:README.md methods:docs/methods.md benchmarks:docs/benchmarks.md rows:docs/rows.md serve:docs/serve.md
PAGES += conflicts:docs/conflicts.md models:docs/models.md anchors:docs/first_gpu_run.md
WRITE := import sys; from importlib import import_module as load
WRITE += ; pages = [word.split(":") for word in sys.argv[1:]]
WRITE += ; sys.exit(max(load(f"lab.pages.{name}_page").main(["--write", path]) for name, path in pages))

docs: $(STAMP)  ## the pages and the config file that are written from the code
	$(PY) -m lab.analytic.formulas --values
	$(PY) -m lab.pages.engine_conf --write conf/engine/default.yaml
	$(PY) -c '$(WRITE)' $(PAGES)
	$(MAKE) docs/placement.md

site: $(STAMP)  ## the pages as a site with search, in build/site; it needs no network
	$(PY) -m lab.pages.site $(ARGS)

recipes: $(STAMP)  ## CONTRIBUTING.md and docs/recipes, followed to the letter in a clone of the last commit, then `make check` there
	$(PY) -m tests.pages.recipes $(ARGS)

mutants: $(STAMP)  ## small mistakes made on purpose: do the tests notice? ARGS="--sample 20" in minutes
	$(PY) -m tests.mutants $(ARGS)

bench-engine: $(STAMP)  ## prefill, machinery and memory against what the arithmetic allows
	$(PY) -m lab.bench.engine_bench --write lab/measured $(ARGS)

bench-select: $(STAMP)  ## selection over the similarity product, growth and memory
	$(PY) -m lab.bench.selection_bench --write lab/measured $(ARGS)

bench-sd: $(STAMP)  ## speculative decoding: speed-ups, overlap and what was predicted
	$(PY) -m lab.bench.speculative_bench --write lab/measured $(ARGS)

bench-decode: $(STAMP)  ## ordinary answers: the engine's loop and generate, after caches of three lengths
	$(PY) -m lab.bench.decode_bench --write lab/measured $(ARGS)

bench-kv: $(STAMP)  ## cache compression: steps against what their bytes allow, scores, memory while evicting
	$(PY) -m lab.bench.kv_bench --write lab/measured $(ARGS)

bench-diffusion: $(STAMP)  ## denoising with merged tokens: time against what the FLOPs promise, scoring and merging
	$(PY) -m lab.bench.diffusion_bench --write lab/measured $(ARGS)

# PEERS has kvpress, and PYTHONPATH a folder with decord, which lmms-eval's model class imports.
bench-peers: $(STAMP)  ## the project beside transformers, kvpress and lmms-eval: PEERS=<an interpreter with kvpress>
	$(PY) -m lab.bench.peer_bench --write lab/measured --peers $(PEERS) $(ARGS)

bench-onepass: $(STAMP)  ## sweeps in one pass over sweeps cell by cell
	$(PY) -m lab.bench.onepass_bench --write lab/measured $(ARGS)

bench-guided: $(STAMP)  ## share of words accepted from a draft, by the tokens of a video that it sees
	$(PY) -m lab.bench.guided_bench --write lab/measured $(ARGS)

rehearsals: $(STAMP)  ## rehearse every model and preset on simulated cards, half an hour; rm conf/rehearsals.csv first
	$(PY) -m lab.bench.rehearsals

bench-gpu: $(STAMP)  ## the figures that need a GPU, in ten minutes; ARGS="--only engine" picks a part
	$(PY) -m lab.bench.gpu_bench --write lab/measured $(ARGS)

notebooks: $(STAMP)  ## run all and store their outputs, without paths of this machine; NOTEBOOKS=notebooks/07* for a part
	$(PY) -m pip install --quiet --disable-pip-version-check nbconvert ipykernel ipywidgets -c constraints.txt
	set -e; for page in $(NOTEBOOKS); do PYTHONPATH=$(CURDIR) $(PY) -m nbconvert --log-level=WARN --to notebook --execute \
	    --ExecutePreprocessor.record_timing=False --stdin --stdout < $$page > $$page.new; \
	    sed -i 's#$(CURDIR)/##g' $$page.new; mv $$page.new $$page; echo $$page; done

pictures: $(STAMP)  ## of README.md, docs/ and lab/measured, from an answer, the demo rows and the measured tables; ARGS=figures/beats_random for one
	$(PY) -m lab.pages.pictures $(ARGS)

demo: $(STAMP)  ## the rows of results/ anew, from a clean commit on an idle machine; ARGS="limit=2" DEMO=/tmp/demo for a trial
	@test -z "$$(git status --porcelain)" || { echo "error: make demo needs a clean commit; valid: nothing in git status"; exit 2; }
	store=$$(mktemp -d); trap 'rm -rf "$$store"' EXIT; set -e; for name in demo demo_speculative; do \
	    $(PY) run.py -m +experiment=$$name store=$$store/$$name json=false $(ARGS); done; for name in demo demo_speculative; do \
	    $(PY) -m espalier store export $(DEMO)/$$name --store $$store/$$name; done

report: $(STAMP)  ## rows, curves, costs, kept tokens and published tables on one page: report/index.html
	$(PY) -m espalier report $(ARGS)

bench: $(STAMP)  ## speed ratios, from one process
	$(PY) -m lab.bench.speed_bench $(ARGS)

quickstart: $(STAMP)  ## all methods x four ratios x two benchmarks, table and plot
	$(PY) run.py +experiment=quickstart $(ARGS)

sweep: $(STAMP)  ## every method against random on all embedded benchmarks: lab/measured/sweep
	$(PY) run.py +experiment=sweep $(ARGS)

train-seedling: $(STAMP)  ## train the embedded models from scratch (some hours on two cores)
	$(PY) -m lab.training all $(ARGS)

clean:  ## remove the caches of tools; .venv and results stay
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
