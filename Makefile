# make demo   sets up, fetches SmolLM2, answers 32 questions over one shared prefix
# make test   sets up, fetches SmolLM2, runs the tests
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-full lint clean

demo: $(VENV)/.installed
	$(BIN)/sapwood demo

test: $(VENV)/.installed
	$(BIN)/sapwood pull smollm2
	$(BIN)/python -m pytest -m "not slow"

# Large hypothesis counts and real-model sweeps: about an hour on two cores.
test-full: $(VENV)/.installed
	$(BIN)/sapwood pull smollm2
	$(BIN)/python -m pytest

lint: $(VENV)/.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

$(VENV)/.installed: pyproject.toml constraints/cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints/cpu.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
