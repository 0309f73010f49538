# Two commands do everything: `make demo` and `make test`. Both make .venv and install what they need.
# On a machine that has a CUDA or ROCm torch already: make demo PYTHON=python3 VENV=

PYTHON ?= python3
VENV ?= .venv

ifeq ($(VENV),)
RUN := PYTHONPATH=src $(PYTHON)
READY :=
else
RUN := $(VENV)/bin/python
READY := $(VENV)/ready
endif

WORKERS ?= 2

# The oldest triton that the Hopper kernel takes; constraints.txt has the newest.
OLD_TRITON := 3.6.0

# What multiplies matrices for the interpreter, on every machine: where a processor's own kernel rounds S and its transpose
# apart, P of the backward pass is farther off than PyTorch's.
INTERPRETER_BLAS := PRESCOTT

.PHONY: demo test test-old-triton lint clean

demo: $(READY)
	$(RUN) -m flashtile demo

test: $(READY)
	$(RUN) -m pytest -n $(WORKERS) -q -m "not interpreter"
	TRITON_INTERPRET=1 OPENBLAS_CORETYPE=$(INTERPRETER_BLAS) $(RUN) -m pytest -n $(WORKERS) -q -m interpreter

# Its compiler alone, with the rest of $(VENV): what it is told, and what it makes of every Hopper config, without a GPU.
test-old-triton: $(VENV)/triton-$(OLD_TRITON)
	PYTHONPATH=$(abspath $<) $(RUN) -c "import triton; assert triton.__version__ == '$(OLD_TRITON)', triton"
	PYTHONPATH=$(abspath $<) $(RUN) -m pytest -n $(WORKERS) -q tests/test_aot.py tests/test_compiler.py -k "hopper or test_compiler"

$(VENV)/triton-$(OLD_TRITON): $(READY)
	$(VENV)/bin/python -m pip install --quiet --no-deps --target $@ triton==$(OLD_TRITON)
	touch $@

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $@

clean:
	rm -rf $(VENV) out build
