# make run   set up, then run the default experiment on the embedded data
# make test  set up, then lint, types, import rules and all tests (of the slow ones every tenth)
# make slow  every second of the slow tests and nothing else, by their names: the even or the odd ones, in turn by commit
# make proof make test with all slow tests
# make coverage  the tests of make test with the lines that they reach, file by file (half as long again)
# make gpu   every method on the CUDA device of this machine, against this process, and a table of times (5 minutes on an H200)
# make sbom  a bill of materials of what is installed in .venv (dist/sbom.json), and known weaknesses in it, where their register can be
#            reached; a weakness ends it with an error
# make lint  lint, types and import rules only
# make docs  the pages of docs/ as a site, in site/

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2

SLOW ?= part

# The interpreter for make gpu: one of the system's where nothing can be installed, else that of make test.
GPU_PYTHON ?= $(BIN)/python
GPU_WORKERS ?= 8

.PHONY: run test slow proof coverage gpu sbom audit-tools lint docs setup setup-dev clean

run: setup
	$(BIN)/nestling run

test: setup-dev lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --slow=$(SLOW)

HALF ?= $(if $(filter 1 3 5 7 9,$(shell git rev-list --count HEAD 2>/dev/null | tail -c 2)),odd,even)

slow: setup-dev
	$(BIN)/python -m pytest -v -n $(WORKERS) --dist loadfile --slow=$(HALF)

proof:
	$(MAKE) test SLOW=all

coverage: setup-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --slow=$(SLOW) --cov=nestling --cov-report=term:skip-covered

gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),setup-dev)
	$(GPU_PYTHON) -m pytest -m gpu -n $(GPU_WORKERS) tests/gpu
	$(GPU_PYTHON) benchmarks/gpu_table.py --data embedded

# In an environment of its own: what looks at the packages is none of them.
sbom: setup audit-tools
	mkdir -p dist
	$(VENV)/audit/bin/cyclonedx-py environment --output-format JSON --output-file dist/sbom.json $(BIN)/python
	$(BIN)/python .ci/weaknesses.py $(VENV)/audit/bin/pip-audit $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

audit-tools: setup
	test -x $(VENV)/audit/bin/python || $(PYTHON) -m venv $(VENV)/audit
	$(VENV)/audit/bin/pip install --quiet --disable-pip-version-check cyclonedx-bom pip-audit

lint: setup-dev
	$(BIN)/ruff check nestling tests benchmarks examples docs/*.py .ci/*.py
	$(BIN)/ruff format --check nestling tests benchmarks examples docs/*.py .ci/*.py
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

setup: $(VENV)/.run
setup-dev: $(VENV)/.dev

$(VENV)/.run: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	touch $@


$(VENV)/.docs: pyproject.toml $(VENV)/.run
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[docs]'
	touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.run
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
