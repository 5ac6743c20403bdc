# What you can do in a checkout. Every target sets up what it needs; nothing is installed outside .venv.
#
#   make up      a real model that responds on http://127.0.0.1:31313
#   make check   what fails fast, while you work
#   make test    everything that must hold before a change goes in

PYTHON  ?= python3
TORCH   ?= $(shell grep -o '^torch==[0-9.]*' packaging/requirements-neuron.lock)
ARGS    ?=
FROM    ?= $(shell git describe --tags --abbrev=0 2>/dev/null || git rev-list -1 --before=1.day HEAD)

BIN      := .venv/bin
RUNNABLE := .venv/.runnable
TESTABLE := .venv/.testable
LOWEST   := .cache/lowest/$(subst ==,-,$(TORCH))
RELEASE  := .cache/release
NEWEST   := .cache/next/$(subst ==,-,$(TORCH))
CLIENTS  := $(addprefix tests/clients/,.venv/frameworks/.made .venv/aider/.made node_modules/.made)
SOURCES  := src tests bench
QUICK    := tests/docs tests/fleet tests/http tests/neuron/engine/scheduling tests/neuron/text tests/routing tests/test_import_rules.py tests/wire
ATTACKS  := tests/hostile tests/http/test_bounds.py tests/http/test_tls.py tests/http/server tests/gateway/test_reload.py \
  tests/gateway/test_access.py tests/gateway/test_failing_database.py tests/gateway/page/test_sign_in_attempts.py \
  tests/gateway/dispatch/operator/test_audit.py tests/gateway/proxy/accounting/test_metering.py tests/neuron/engine/loading/test_damaged_checkpoints.py \
  tests/neuron/engine/scheduling/test_budget.py tests/neuron/engine/scheduling/test_scheduler.py tests/neuron/node/harness/command/test_group.py \
  tests/neuron/kernels/native/test_library.py tests/neuron/hub_process/test_resolver.py tests/system/test_private_file.py

# The suite starts many programs. Without compiled files every one of them would compile the sources again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup up check test lint types suite kernels lowest next fuzz soak hostile clients mixed groups swaps release distribution small site format bench docs locks sbom clean

help: ## Show this table of contents
	@sed -n 's/^\([a-z]*\):.*## /\1	/p' $(MAKEFILE_LIST) | expand -t 14 | sed 's/^/  make /'

setup: $(TESTABLE) ## Create .venv with cortex, the engine and the development tools

up: $(RUNNABLE) ## Bring the demo model, start gateway and neuron; Ctrl-C ends both (ARGS="--port 8000 MODEL")
	@exec $(BIN)/cortex up $(ARGS)

check: lint ## Lint, types, import rules and the fast tests (QUICK), in about a minute: while you work
	@$(MAKE) --no-print-directory -j2 types suite ARGS="$(QUICK)"

test: lint ## Lint, format check, types, import rules and the whole test suite
	@$(MAKE) --no-print-directory -j2 types suite kernels # side by side, so that no core idles while one of them ends

lint: $(TESTABLE) ## Check style and formatting
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

types: $(TESTABLE) ## Check types, strictly
	$(BIN)/mypy

suite: $(TESTABLE) ## Run the tests (ARGS="tests/wire -k stream" for a part)
	$(BIN)/python -m pytest --processes auto $(ARGS)

kernels: $(TESTABLE) ## Run the GPU kernels' tests on the CPU, under Triton's interpreter
	TRITON_INTERPRET=1 $(BIN)/python -m pytest --processes auto tests/neuron/kernels

lowest: $(LOWEST)/.made ## Run the tests with the lowest versions that pyproject.toml admits (TORCH=… ARGS="tests/wire")
	$(LOWEST)/bin/python -m pytest --processes auto $(ARGS)

next: ## Run the tests with the newest versions, also pre-releases and those that pyproject.toml excludes (TORCH, ARGS)
	rm -rf $(NEWEST)
	@$(MAKE) --no-print-directory $(NEWEST)/.made
	$(NEWEST)/bin/python -m pytest --processes auto $(ARGS)

fuzz: MINUTES ?= 30
fuzz: $(TESTABLE) ## Run the property tests with random examples until one fails (MINUTES=30 ARGS="tests/wire")
	@end=$$(($$(date +%s) + 60 * $(MINUTES))); while [ $$(date +%s) -lt $$end ]; do \
	  $(BIN)/python -m pytest --processes auto -m hypothesis --hypothesis-profile fuzz --timeout 3600 $(ARGS) || exit 1; done

soak: MINUTES ?= 60
soak: $(TESTABLE) ## Run mixed traffic with swaps and faults for an hour; everything must be flat (MINUTES=60)
	PYTHONPATH=src:. $(BIN)/python -m tests.soak.run --minutes $(MINUTES) $(ARGS)

hostile: $(TESTABLE) ## Attack running programs with full counts; `make test` does it with small ones
	HOSTILE=full $(BIN)/python -m pytest $(ATTACKS) $(ARGS)

clients: $(TESTABLE) $(CLIENTS) ## Run SDKs, frameworks and coding agents, unmodified, against gateway and node (needs Node)
	$(BIN)/python -m pytest tests/clients $(ARGS)

mixed: $(TESTABLE) ## Run gateway and node of this revision with those of an earlier one (FROM=v0.1.0; without a tag, a day ago)
	MIXED_WITH=$(FROM) $(BIN)/python -m pytest tests/e2e/daemon/test_mixed_versions.py $(ARGS)

groups: $(TESTABLE) ## Run all tests of models on several nodes, also those that take long (root: in network namespaces)
	GROUP_TESTS=full $(BIN)/python -m pytest --processes auto tests/e2e/daemon/test_groups.py tests/e2e/daemon/test_group_networks.py $(ARGS)

swaps: $(TESTABLE) bench/swaps/.venv/.made ## Swap a native model, llama.cpp's server and a speech server 100 times (GGUF=FILE; needs espeak-ng)
	$(BIN)/python bench/swaps/run.py --gguf $(GGUF) --llama-python bench/swaps/.venv/bin/python $(ARGS)

bench/swaps/.venv/.made:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet 'llama-cpp-python[server]'
	touch $@

release: $(TESTABLE) $(RELEASE)/.made ## Build wheel, sdist, SBOMs, provenance and checksums into dist/ and try them (needs a package index)
	$(RELEASE)/bin/python packaging/release.py dist
	$(RELEASE)/bin/twine check --strict dist/*.whl dist/*.tar.gz
	@DIST=dist $(MAKE) --no-print-directory distribution site

distribution: $(TESTABLE) $(RELEASE)/.made ## Build wheel and sdist, install them in clean environments and try them (needs a package index)
	TEST_INSTALLATION=$(RELEASE)/bin/python $(BIN)/python -m pytest tests/packaging/test_installation.py $(ARGS)

small: $(RELEASE)/.made ## Build gateway and harness-only node, without the engine, as one file: dist/cortex.pyz (needs a package index)
	@mkdir -p dist
	$(RELEASE)/bin/shiv --compressed --reproducible --extend-pythonpath --python '/usr/bin/env python3' \
	  --entry-point cortex.cli.entry:single_file --output-file dist/cortex.pyz --quiet '.[hub]'
	@ls -l dist/cortex.pyz

site: $(RELEASE)/.made ## Build the documentation site into dist/site; a broken link is an error
	@rm -rf .cache/site dist/site && mkdir -p .cache/site/pages dist
	@cp -r *.md LICENSE docs examples .cache/site/pages && cp packaging/site.toml .cache/site/zensical.toml
	$(RELEASE)/bin/zensical build --strict --config-file .cache/site/zensical.toml
	@mv .cache/site/site dist/site

format: $(TESTABLE) ## Rewrite the sources in house format
	$(BIN)/ruff check --fix-only --quiet $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

bench: $(TESTABLE) ## List the benchmarks; each prints its own --help
	@grep -l ArgumentParser bench/*.py bench/*/*.py | sed 's|^|  $(BIN)/python |'

docs: $(TESTABLE) ## Regenerate the references of configuration, request fields and models
	$(BIN)/python -m cortex.cli.reference docs/configuration.md
	$(BIN)/python -m cortex.wire.dialects.page docs/fields.md
	$(BIN)/python -m cortex.neuron.models_page docs/models.md

locks: $(TESTABLE) ## Pin what the container images install, with hashes: the versions that are tested (needs uv)
	$(BIN)/python packaging/lock.py

sbom: $(TESTABLE) ## Write the bill of materials of each container image to dist/, in CycloneDX
	$(BIN)/python packaging/sbom.py dist

clean: ## Remove .venv and everything the tools left behind
	rm -rf .venv .cache tests/clients/.venv tests/clients/node_modules build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

# --- set-up -----------------------------------------------------------------------------------------------------------
# torch goes first and in the locked version: the package itself accepts a range, and a bare resolve may pull gigabytes.

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "cortex needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv .venv || \
	  { rm -rf .venv; echo "creating .venv failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

$(RUNNABLE): pyproject.toml | .venv/bin/python
	@echo "setting up .venv (once; torch is the large part)"
	@$(BIN)/python -m pip install --disable-pip-version-check "$(TORCH)"
	@$(BIN)/python -m pip install --disable-pip-version-check -e ".[neuron]"
	@touch $@

$(TESTABLE): pyproject.toml | $(RUNNABLE)
	@echo "adding the development tools to .venv"
	@$(BIN)/python -m pip install --disable-pip-version-check "$(TORCH)" -e ".[neuron,dev]"
	@touch $@

# Other versions than those of .venv. torch comes first, from where pip finds it, and stays as it is: others take gigabytes.
$(LOWEST)/.made: pyproject.toml
	@echo "setting up $(LOWEST) (once)"
	@$(PYTHON) -m venv --clear $(LOWEST)
	@$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check uv "$(TORCH)"
	@$(LOWEST)/bin/uv pip install --python $(LOWEST)/bin/python --resolution lowest-direct "$(TORCH)" -e ".[neuron,dev]"
	@touch $@

$(NEWEST)/.made:
	@echo "setting up $(NEWEST)"
	@$(PYTHON) -m venv --clear $(NEWEST)
	@$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check uv "$(TORCH)"
	@printf '%s\n' "$(TORCH)" transformers > $(NEWEST)/overrides.txt
	@$(NEWEST)/bin/uv pip install --python $(NEWEST)/bin/python --prerelease allow --overrides $(NEWEST)/overrides.txt -e ".[neuron,dev]"
	@touch $@

$(RELEASE)/.made: packaging/requirements-release.txt packaging/requirements-build.lock
	@echo "setting up $(RELEASE) (once)"
	@$(PYTHON) -m venv --clear $(RELEASE)
	@$(RELEASE)/bin/pip install --quiet --disable-pip-version-check -r packaging/requirements-release.txt
	@$(RELEASE)/bin/pip install --quiet --disable-pip-version-check --require-hashes -r packaging/requirements-build.lock
	@touch $@

# Every client has the versions that it was tested with. aider needs other versions than the frameworks.
tests/clients/.venv/%/.made: tests/clients/requirements-%.txt
	@echo "setting up the clients in tests/clients/.venv/$* (once)"
	@$(PYTHON) -m venv tests/clients/.venv/$*
	@tests/clients/.venv/$*/bin/pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

tests/clients/node_modules/.made: tests/clients/package.json
	@echo "setting up the clients in tests/clients/node_modules (once)"
	@cd tests/clients && npm install --silent --no-fund --no-audit
	@touch $@
