# One recipe per chore. Everything runs in .venv, which `make` fills by itself on first use.
PYTHON ?= python3
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
GROUPS := build test lint
, := ,

.PHONY: demo test lint bench ctest clang aarch64 valgrind sanitize golden exhaustive fuzz clean

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

# $(call c_tests,build folder,arguments of setup,arguments of test)
c_tests = @test -d build/$1 || $(BIN)/meson setup -Dpython=false $2 build/$1 >/dev/null; \
	$(BIN)/meson test -C build/$1 --print-errorlogs $3

ctest: .venv/built           ## the C library's own tests, without Python
	$(call c_tests,c)

clang: export CC := clang
clang: export CXX := clang++
clang: .venv/built           ## the same, built by clang
	$(call c_tests,clang)

aarch64: .venv/built         ## the same for 64-bit ARM: gcc-aarch64-linux-gnu, g++-aarch64-linux-gnu, qemu-user
	$(call c_tests,aarch64,--cross-file tests/c/aarch64.ini,-t 10)

valgrind: export CNORM_ISA := avx2
valgrind: .venv/built        ## the same under valgrind, which knows no AVX-512
	$(call c_tests,c,,-t 20 --wrap 'valgrind --quiet --error-exitcode=1 --leak-check=full')

sanitize: .venv/built        ## the same with ASan and UBSan, then with TSan; then the extension under pytest
	$(call c_tests,sanitize,--buildtype=debugoptimized -Db_sanitize=address$(,)undefined -Db_lundef=false,-t 5)
	$(call c_tests,tsan,--buildtype=debugoptimized -Db_sanitize=thread -Db_lundef=false,test_threads)
	tests/c/sanitized_pytest.sh $(BIN)/python

golden: .venv/built          ## write tests/golden anew: a knowing change of results, for the changelog
	@test -d build/c || $(BIN)/meson setup -Dpython=false build/c >/dev/null
	$(BIN)/meson compile -C build/c golden
	build/c/tests/c/golden --write tests/golden

exhaustive: .venv/built      ## sigmoid and tanh on all 2^32 float32 inputs: minutes
	$(call c_tests,c,,--benchmark exhaustive)

# An editable install rebuilds on import what has changed: edit C, run pytest.
.venv/built: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(GROUPS:%=--group %)
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

clean:
	rm -rf .venv build demo_out bench_out
