# One recipe per chore. Everything runs in .venv, which `make` fills by itself on first use.
PYTHON ?= python3
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
GROUPS := build test lint

.PHONY: demo test lint bench ctest exhaustive fuzz clean

demo: .venv/built            ## the whole product in under 20 seconds
	$(BIN)/cnorm demo

test: .venv/built ctest      ## everything a contributor must see green
	$(BIN)/python -P -m pytest

lint: .venv/built            ## style of Python, Cython and stubs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/cython-lint --max-line-length 120 cnorm/*.pyx cnorm/*.pxi cnorm/*.pxd

bench: .venv/built           ## ratios against PyTorch, onnxruntime, numba, NumPy where they are importable
	$(BIN)/pip install --quiet --group bench
	$(BIN)/python -P benchmarks/table.py

ctest: .venv/built           ## the C library's own tests, without Python
	@test -d build/c || $(BIN)/meson setup -Dpython=false build/c >/dev/null
	$(BIN)/meson test -C build/c --print-errorlogs

exhaustive: .venv/built      ## sigmoid and tanh on all 2^32 float32 inputs: minutes
	@test -d build/c || $(BIN)/meson setup -Dpython=false build/c >/dev/null
	$(BIN)/meson test -C build/c --print-errorlogs --benchmark exhaustive

# An editable install rebuilds on import what has changed: edit C, run pytest.
.venv/built: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(GROUPS:%=--group %)
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

clean:
	rm -rf .venv build demo_out bench_out
