# `make demo` and `make test` each do their whole set-up first; everything is installed into .venv.

.DEFAULT_GOAL := help
.PHONY: help setup base demo test test-s3 chaos soak test-restore test-ui chart endure fuzz audit licences lint style types fmt check bench docs lock release-check images images-check sbom clean
BIN := .venv/bin
STAMP := .venv/.setup-done
TOOLS := build/tools/.done
BASE := smollm2-135m
ARGS ?=
FUZZ_S ?= 1800
SOAK_S ?= 900
# A file is the unit, as its tests share what is dear to build; in the order of folders the longest come first. Five processes
# for two cores: half of the time of many tests is that of servers which start.
PARALLEL := -n $(shell expr 5 \* $$(getconf _NPROCESSORS_ONLN) / 2) --maxprocesses 5 --dist loadfile --no-loadscope-reorder
# Hundreds of processes of a test run would compile the same sources.
unexport PYTHONDONTWRITEBYTECODE

help: ## Show this list
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  Arguments for pytest and the demo: make test ARGS='tests/gateway -x', make demo ARGS='--port 8080'"

setup: $(STAMP) ## Install everything into .venv (CPU or CUDA PyTorch, by what the machine has)

$(STAMP): pyproject.toml platform/loraplex/version.py requirements/lock.txt requirements/cpu.txt scripts/setup.sh
	@scripts/setup.sh
	@touch $@

base: $(STAMP) ## Fetch the small chat model that the demo and some tests use
	@$(BIN)/python -m loraplex_engine pull $(BASE)

demo: $(STAMP) ## Start the platform with three example teams and ask them all one question (ONCE=1: then stop)
	@$(BIN)/loraplex up --demo $(if $(ONCE),--once) $(ARGS)

# The collection before the run compiles once what each process would.
test: $(STAMP) ## Run all tests, in up to five processes (in one: ARGS='-n 0'); a few that fail once more, alone
	@$(BIN)/python -c 'from loraplex_engine.ops.native import build; build.native_status()' & \
	{ [ -d tests/__pycache__ ] || $(BIN)/python -m pytest -q --collect-only; } >/dev/null & compiling=$$!; \
	$(BIN)/python -m loraplex_engine pull $(BASE) || \
	  echo "==> The base model $(BASE) could not be fetched: the tests that need it are skipped, all others run."; \
	wait $$compiling || true
	@$(BIN)/python -m pytest $(PARALLEL) --second-try $(ARGS)

test-s3: $(STAMP) ## Run the tests that need an S3 server; they start SeaweedFS on loopback
	@LORAPLEX_TEST_REQUIRE=s3 $(BIN)/python -m pytest tests/registry -k s3 $(ARGS)

test-restore: $(STAMP) ## Put a Postgres with archived WAL back to a moment, beside an S3 server, and compare the two
	@LORAPLEX_TEST_REQUIRE=postgres,s3 $(BIN)/python -m pytest -n 0 tests/backup/integration/point_in_time.py $(ARGS)

test-ui: $(STAMP) ## Run the dashboard in a real Chromium, which the machine has to have (pictures: ARGS='--shots FOLDER')
	@$(BIN)/python -m pip install -q -c requirements/lock.txt -e '.[ui]'
	@LORAPLEX_TEST_REQUIRE=chromium $(BIN)/python -m pytest -n 0 tests/ui $(ARGS)

chart: $(STAMP) ## Judge the Helm chart in full, with two helms, kubectl and the schemas of three versions of Kubernetes
	@LORAPLEX_TEST_REQUIRE=helm,kubectl,kubernetes-schemas,promtool,openssl $(BIN)/python -m pytest -n 0 tests/chart --endure $(ARGS)

endure: $(STAMP) ## Run the long tests at full length, some hours; `make test` has each of them for a few seconds
	@$(BIN)/python -m pytest -m "endure or pairs or hypothesis" --endure $(ARGS)

chaos: $(STAMP) ## Hurt every part under load, some ten minutes, and write the table in docs/chaos.md
	@mkdir -p build && rm -f build/chaos.jsonl
	@LORAPLEX_TEST_CHAOS_ROWS=build/chaos.jsonl $(BIN)/python -m pytest -n 0 tests/chaos --endure $(ARGS)
	@$(BIN)/python tests/chaos_page.py build/chaos.jsonl

soak: $(STAMP) ## Let a platform run for SOAK_S=900 seconds with everything at once, and look at what grows: build/soak.md
	@mkdir -p build
	@LORAPLEX_TEST_SOAK_S=$(SOAK_S) LORAPLEX_TEST_SOAK_REPORT=build/soak.md $(BIN)/python -m pytest -n 0 tests/soak $(ARGS)

fuzz: $(STAMP) ## Fuzz every parser that meets outside bytes, FUZZ_S=1800 in all; led by coverage where atheris is to be had
	@$(BIN)/python -m pip install -q -e '.[fuzz]' || echo "==> atheris is not to be had here: inputs are mutations of good ones"
	@$(BIN)/python tests/fuzz/run.py --seconds $(FUZZ_S) $(ARGS)

audit: $(STAMP) ## Ask for known holes in what the locks pin (skipped by name where nobody can be asked)
	@scripts/audit.sh

licences: $(STAMP) ## Write docs/licences.md from what is installed
	@$(BIN)/python scripts/licences.py

lint: style types ## Check style, types, the layers between packages and the layout

style: $(STAMP)
	@scripts/check_layout.sh
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/mypy

fmt: $(STAMP) ## Format the code and mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: lint test ## lint, then test: what has to pass before a change lands

bench: $(STAMP) ## Measure batching, the ops and attention, some minutes; longer: make bench_lora, bench_slots, bench_loads
	@$(BIN)/python tests/bench/bench_engine.py $(ARGS)
	@$(BIN)/python tests/bench/bench_ops.py
	@$(BIN)/python tests/bench/bench_attention.py

bench_%: $(STAMP)
	@$(BIN)/python tests/bench/$@.py $(ARGS)

docs: $(STAMP) ## Build the documentation as a site into build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(TOOLS): requirements/release.txt
	@$(BIN)/python -m venv --clear build/tools
	@build/tools/bin/pip install -q --require-hashes -r $<
	@touch $@

lock: $(TOOLS) ## Write requirements/*.txt: the versions in .venv, and with hashes what images and tools are made of
	@scripts/lock.sh

release-check: $(STAMP) $(TOOLS) ## From a clean tree: build wheel and sdist, install them elsewhere, run the demo from the wheel
	@$(BIN)/python scripts/release_check.py $(ARGS)

images: ## Build the images from the bases in images/pins.env (BUILDER=docker, REGISTRY=host/)
	@images/build.sh

images-check: $(STAMP) ## Build the images with buildah on a base made here, and run them (root, Debian; ARGS=control-plane: one)
	@$(BIN)/python scripts/release_images.py $(ARGS)

sbom: $(TOOLS) ## Write what the images hold of Python packages, as CycloneDX, into build/sbom
	@mkdir -p build/sbom
	@for image in control-plane engine; do build/tools/bin/cyclonedx-py requirements --output-reproducible \
	  --of JSON -o build/sbom/loraplex-$$image.cdx.json requirements/$$image.txt && echo build/sbom/loraplex-$$image.cdx.json || exit 1; done

clean: ## Remove .venv and the caches of tools (fetched models stay)
	rm -rf .venv dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
