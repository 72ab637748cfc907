# Every target makes what it needs: after a clone, `make demo` or `make test` is the first command.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# What the developer's environment holds includes what the demo and the examples need; without it
# they make their own.
DEVELOPMENT := $(VENV)/.development
DEMONSTRATION := $(firstword $(wildcard $(DEVELOPMENT)) $(VENV)/.demonstration)
EXAMPLES := $(firstword $(wildcard $(DEVELOPMENT)) $(VENV)/.examples)

# Tests start hundreds of processes, and each would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo example quick test journeys citus procrastinate screenshots check format format-check lint types contracts chaos-short battery chaos soak test-matrix smoke bench bench-smoke docs build release clean

# As many processes as tests/conftest.py says.
PYTEST := $(BIN)/pytest -n auto --dist worksteal
SCHEMA := $(BIN)/check-jsonschema --quiet --builtin-schema vendor

# What fails first when the core is wrong.  `tests/test_quick.py` holds it to 20 s on two cores.
QUICK := $(addprefix tests/,arguments handler worker/claiming \
  $(addprefix repository/test_,claim.py enqueue.py fence.py settle.py) \
  $(addprefix test_,admission.py claims.py contract.py filter_line.py findings.py laws.py limits.py \
    meta.py options.py redaction.py required_results.py retry.py schedule_rules.py))

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(DEVELOPMENT) ## Make the environment .venv, once (PYTHON=python3.12 VENV=.venv-3.12 makes another)

demo: $(DEMONSTRATION) ## Watch it work on a PostgreSQL of its own (ARGS="--url ..." for yours)
	@$(BIN)/pgqueue demo $(ARGS)

example: $(EXAMPLES) ## Run an example on a PostgreSQL of its own (ARGS=shop, ARGS=two_tables)
	@$(BIN)/python -m examples $(ARGS)

quick: contracts ## Run the inner loop: import contracts, units, statements, the public contract
	@$(PYTEST) -m "not battery" $(QUICK) $(ARGS)

test: setup ## Run the tests (PGQUEUE_TEST_URL=... for your own server, ARGS="-k word" for some)
	@$(PYTEST) -m "not battery and not benchmark and not chaos and not citus and not journey" $(ARGS)

journeys: setup ## Run the tests of examples, pages, demo, servers, installations, services and workers
	@$(PYTEST) -m journey $(ARGS)

citus: setup ## Run the tests on a cluster of Citus (CITUS_HOME=/usr/lib/postgresql/15 names a PostgreSQL that has it)
	@$(BIN)/pytest -n 0 tests/citus $(ARGS)

procrastinate: setup ## Run Procrastinate's acceptance tests over pgqueue (CHECKOUT=../procrastinate)
	@$(BIN)/python -m examples.procrastinate.run "$(CHECKOUT)" $(ARGS)

screenshots: setup ## Write pictures of all pages of the dashboard into build/screenshots
	@PGQUEUE_SCREENSHOTS=build/screenshots $(BIN)/pytest -m journey -k fits tests/dashboard $(ARGS)

chaos-short: setup ## Run each chaos scenario in its short form, without and with its planted bugs
	@$(PYTEST) -m chaos tests/chaos $(ARGS)

check: format-check lint types contracts docs test journeys chaos-short bench-smoke smoke release ## Run everything a change has to pass

format: setup ## Rewrite the code to the house's format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

format-check: setup
	@$(BIN)/ruff format --check .

lint: setup ## Look for mistakes with ruff, and in the files of the hosted repository
	@$(BIN)/ruff check .
	@$(SCHEMA).github-workflows .github/workflows/*.yml
	@$(SCHEMA).dependabot .github/dependabot.yml
	@$(SCHEMA).github-issue-config .github/ISSUE_TEMPLATE/config.yml
	@$(SCHEMA).github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))

types: setup ## Check the types with mypy --strict
	@$(BIN)/mypy

contracts: setup ## Check that modules import downwards only
	@$(BIN)/lint-imports

battery: setup ## Run the long tests, those with random data, and those that count seconds, on a machine that does nothing else
	@PGQUEUE_TIMED=1 $(PYTEST) -m "battery or timed or hypothesis" $(ARGS)

chaos: setup ## Run the chaos battery (ARGS="--seed 7 --only kills")
	@$(BIN)/python -m chaos $(ARGS)

soak: setup ## Run half an hour of faults of every kind
	@$(BIN)/python -m chaos --only soak $(ARGS)

test-matrix: setup ## Run the tests on the oldest and newest versions (ARGS="-s 'tests(oldest)' -- tests/arguments")
	@$(BIN)/nox $(ARGS)

smoke: setup ## Try the wheel alone, and a few jobs beside the oldest and the newest versions
	@$(BIN)/nox -s wheel smoke $(ARGS)

bench: setup ## Measure beside other queues (ARGS="--only drain --turns 7", "--full", "list")
	@$(BIN)/python -m benchmarks $(ARGS)

bench-smoke: setup ## Run every benchmark in its tiniest size
	@$(PYTEST) -m benchmark tests/benchmarks $(ARGS)

docs: setup ## Build the site of the documentation into build/site, and check every link
	@$(BIN)/zensical build --clean --strict
	@$(BIN)/python docs/site/check_links.py build/site

build: setup ## Build the wheel and the source archive into dist/
	@$(BIN)/python -m build --no-isolation

release: setup ## Try what a release does, up to the upload: build, check, install, run the first program
	@$(BIN)/python tests/smoke/release.py

clean: ## Remove builds and caches; the environment stays
	@rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@rm -rf .import_linter_cache .coverage
	@find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +

$(DEVELOPMENT): EXTRA := dev,project
$(VENV)/.demonstration: EXTRA := demo
$(VENV)/.examples: EXTRA := examples
$(DEVELOPMENT) $(VENV)/.demonstration $(VENV)/.examples: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'pgqueue needs Python 3.11 or newer, and $(PYTHON) is not:' \
	    'name another one, as in `make PYTHON=python3.12 $(or $(MAKECMDGOALS),setup)`.' >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo '$(PYTHON) cannot make an environment:' \
	    'install its venv package (on Debian and Ubuntu: `apt install python3-venv`).' >&2; exit 1; }
	@echo 'Making the environment $(VENV), once ...'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --editable '.[$(EXTRA)]'
	@touch $@
