# `make demo` and `make test` each do their whole set-up first; everything is installed into .venv.

.DEFAULT_GOAL := help
.PHONY: help setup base demo test endure lint fmt check bench lock clean
BIN := .venv/bin
STAMP := .venv/.setup-done
BASE := smollm2-135m
ARGS ?=
# A file is the unit, as its tests share what is dear to build; in the order of folders the longest come first.
PARALLEL := -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

help: ## Show this list
	@awk -F':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  Arguments for pytest and the demo: make test ARGS='tests/gateway -x', make demo ARGS='--port 8080'"

setup: $(STAMP) ## Install everything into .venv (CPU or CUDA PyTorch, by what the machine has)

$(STAMP): pyproject.toml requirements/lock.txt requirements/cpu.txt scripts/setup.sh
	@scripts/setup.sh
	@touch $@

base: $(STAMP) ## Fetch the small chat model that the demo and some tests use
	@$(BIN)/python -m loraplex_engine pull $(BASE)

demo: $(STAMP) ## Start the platform with three example teams and ask them all one question (ONCE=1: then stop)
	@$(BIN)/loraplex up --demo $(if $(ONCE),--once) $(ARGS)

test: $(STAMP) ## Run all tests, on up to four cores (in one process: ARGS='-n 0')
	@$(BIN)/python -m loraplex_engine pull $(BASE) || \
	  echo "==> The base model $(BASE) could not be fetched: the tests that need it are skipped, all others run."
	@$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

endure: $(STAMP) ## Run the long cases at full length, an hour or so; `make test` has each of them for a few seconds
	@$(BIN)/python -m pytest tests/cases -m endure --endure $(ARGS)

lint: $(STAMP) ## Check style, types, the layers between packages and the layout
	@scripts/check_layout.sh
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

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

lock: ## Pin the versions in .venv into requirements/lock.txt
	@scripts/lock.sh

clean: ## Remove .venv and the caches of tools (fetched models stay)
	rm -rf .venv dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
