# Every recipe runs in .venv, which `make` creates on first use.
PYTHON ?= python3
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
# the editable install's build, with the C tests
RELEASE = build/cp$(shell $(BIN)/python -c 'import sys; print(*sys.version_info[:2], sep="")')

.PHONY: help demo test test-all lint bench ctest amalgamation wheels two-files platforms clang aarch64 valgrind asan sanitize sanitize-quick golden exhaustive soak adversarial gradients presets fuzz malformed mutated cluster paper paper-long runtimes frameworks docs lock clean

help:                        ## this list
	@sed -n 's/^\([a-z][a-z0-9-]*\):[^#]*## \(.*\)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

demo: .venv/built            ## the whole product in 20 seconds, the first time after some minutes of building
	$(BIN)/python -P examples/demo/demo.py

test: .venv/built ctest      ## the tests that must pass before a commit, without what is exhaustive
	$(BIN)/python -P -m pytest -n auto

test-all: .venv/built ctest  ## every test, as .ci/run: every combination, length and writing
	$(BIN)/python -P -m pytest -n auto --all

lint: .venv/built            ## style of Python, Cython, stubs and C
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/cython-lint --max-line-length 120 cnorm/*.pyx cnorm/*.pxi
	$(BIN)/clang-format --dry-run -Werror $(FORMATTED)

# C files, which .clang-format (clang-format 14) formats
FORMATTED := $(wildcard $(foreach folder,. include int8 kernels rnn rnn/layers simd,src/$(folder)/*.c src/$(folder)/*.h))

bench: .venv/built           ## time ratios to PyTorch, onnxruntime, numba and NumPy, if installed
	$(BIN)/pip install --quiet --group bench
	$(BIN)/python benchmarks/table.py

# $(call configure,build folder,arguments of meson setup): its output only if it fails
define configure
	@test -f build/$1/build.ninja || { mkdir -p build && $(BIN)/meson setup -Dpython=false $2 build/$1 >build/$1.log; } || \
	  { cat build/$1.log; exit 1; }
endef

# $(call c_tests,build folder,arguments of setup,arguments of test)
define c_tests
	$(call configure,$1,-Dstrict=true $2)
	$(BIN)/meson test -C build/$1 --print-errorlogs $3
endef

ctest: .venv/built           ## the tests of the C library, without Python
	$(BIN)/meson test -C $(RELEASE) --print-errorlogs

amalgamation:                ## build/amalgamation/cnorm.c and cnorm.h: the C library as two files
	$(PYTHON) -P src/amalgamate.py build/amalgamation

wheels:                      ## wheels for WHEEL_PYTHONS, or every Python found, in build/wheels, each tried in a clean environment without a compiler (minutes); CROSS: other platforms, as zig names them; AArch64 runs under qemu-aarch64
	CROSS='$(CROSS)' .ci/wheels build/wheels $(WHEEL_PYTHONS)

TWO_FILES ?= gcc clang
two-files: amalgamation      ## the two files, compiled with -O2 and no other flag by each compiler of TWO_FILES: no warning, C tests, no float64 FMA
	$(foreach compiler,$(TWO_FILES),PYTHON=$(PYTHON) tests/c/two_files $(compiler) build/amalgamation &&) true
	@if $(PYTHON) -P -c 'import ziglang' 2>/dev/null; then PYTHON=$(PYTHON) tests/c/two_files '$(PYTHON) -P -m ziglang cc' build/amalgamation; \
	else echo '!!! NOT RUN: zig, which `pip install ziglang` brings' >&2; fi

platforms: export ZIG_GLOBAL_CACHE_DIR := $(CURDIR)/build/zig-cache
platforms: export ZIG_LOCAL_CACHE_DIR := $(CURDIR)/build/zig-cache
platforms: .venv/built amalgamation ## the two files compiled by zig for eleven platforms, and run there: docs/platforms.md names the Debian packages; QUICK=1: as in .ci/run
	$(BIN)/python -m pip install --quiet 'ziglang>=0.17'
	$(BIN)/python -P tests/c/platforms.py build/amalgamation $(if $(QUICK),--quick)

clang: private export CC := clang
clang: private export CXX := clang++
clang: .venv/built           ## the same, built by clang
	$(call c_tests,clang)

aarch64: .venv/built         ## the same for 64-bit ARM, emulated: gcc-aarch64-linux-gnu, g++-aarch64-linux-gnu, qemu-user
	$(call c_tests,aarch64,--cross-file tests/c/aarch64.ini,-t 10)

valgrind: export CNORM_ISA := avx2
valgrind: .venv/built        ## under valgrind, which lacks AVX-512: every 7th length, without the tests that would take an hour
	$(BIN)/meson test -C $(RELEASE) --print-errorlogs -t 20 --wrap 'valgrind --quiet --error-exitcode=1 --leak-check=full' \
	  --test-args 7 test_capi test_guard_pages test_threads test_network test_cells

# The C tests and the extension with ASan and UBSan: one build, build/asan, which is installed into its folder `site`.
ADDRESS := -Db_sanitize=address,undefined -Db_lundef=false
build/asan/site: .venv/built FORCE
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --upgrade --target $@ -Cbuild-dir=build/asan \
	  $(addprefix -Csetup-args=,-Dstrict=true -Dbuildtype=debug -Doptimization=1 $(ADDRESS)) .
FORCE:

asan: build/asan/site        ## with ASan and UBSan, which takes a few minutes
	$(BIN)/meson test -C build/asan --print-errorlogs -t 10

sanitize: asan               ## then threads with TSan, and the extension with ASan and UBSan under pytest
	$(call c_tests,tsan,--buildtype=debug --optimization=1 -Db_sanitize=thread -Db_lundef=false,-t 10 test_threads)
	$(call sanitized_pytest,-k 'not hundred_thousand_streams' $(SANITIZED))

# Rejected arguments, and the extension under garbage collection, forks, threads and failing allocations.
sanitize-quick: build/asan/site ## the extension under ASan and UBSan, a selection for CI
	$(call sanitized_pytest,$(addprefix tests/norms/test_,errors.py lying_arguments.py) tests/project/test_changed_arrays.py tests/rnn/test_stream_lifetime.py tests/rnn/test_stream_state.py)

# $(call sanitized_pytest,arguments): pytest with the extension of build/asan/site. -S hides the editable install, which is
# a .pth file. No pytest-xdist: its workers would not get -S.
define sanitized_pytest
	LD_PRELOAD="$$(cc -print-file-name=libasan.so) $$(cc -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=64 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	  PYTHONPATH="build/asan/site:$$($(BIN)/python -c 'import sys; print(*(p for p in sys.path if "site-packages" in p), sep=":")')" \
	  $(BIN)/python -S -P -m pytest -q -p no:cacheprovider $1
endef

# Tests that call every entry of the extension. The C tests cover the kernels. The memory of many streams is not measured
# here, since ASan adds to it. The tests of cnorm.torch run if PyTorch is installed.
SANITIZED := $(patsubst %,tests/norms/test_%.py,errors lying_arguments properties other_norms batch_norm group_norm \
  weight_norm divisive_norm) $(patsubst %,tests/rnn/test_%.py,streams stream_lifetime \
  stream_state conv elementwise taps) $(patsubst %,tests/train/test_torch_%.py,cells sequences misuse)

golden: .venv/built          ## rewrite tests/golden, after an intended change of results that the changelog names
	$(BIN)/meson compile -C $(RELEASE) golden
	$(RELEASE)/tests/c/golden --write tests/golden

exhaustive: .venv/built      ## sigmoid and tanh on all 2^32 float32 inputs, fma on 10^8 triples (minutes)
	$(BIN)/meson test -C $(RELEASE) --print-errorlogs --benchmark exhaustive fma

soak: .venv/built            ## ten million steps of every cell with zero input (minutes)
	CNORM_SOAK_STEPS=10000000 $(BIN)/python -P -m pytest -n auto tests/rnn/test_streams.py -k silence

gradients: .venv/built       ## gradients of every preset over 1 to 100 steps of 1 to 33 rows against float64 (minutes)
	CNORM_ALL_GRADIENTS=1 $(BIN)/python -P -m pytest -q -n auto tests/train/test_gradient_bounds.py

presets: .venv/built         ## every preset read back from ONNX in every form and opset, and cells of PyTorch (minutes)
	CNORM_ALL_PRESETS=1 $(BIN)/python -P -m pytest -n auto tests/onnx_export/test_import_cells.py tests/onnx_export/test_import_torch_cells.py tests/onnx_export/test_import_torch_plain.py

adversarial: .venv/built      ## 10^6 float64 rows made to lose digits, forward and backward, against longdouble (minutes)
	CNORM_ADVERSARIAL_ROWS=1000000 $(BIN)/python -P -m pytest -n auto -rP tests/norms/test_adversarial_rows.py

paper: .venv/built           ## re-run the paper's experiments, draw their curves, time its cells; QUICK=1: a few updates of each
	$(BIN)/python -m pip install --quiet --group torch
	$(BIN)/python examples/paper/run.py $(if $(QUICK),--quick)
	$(if $(QUICK),,$(BIN)/python examples/paper/shapes.py)

paper-long: .venv/built      ## what `make paper` does not reproduce for 5 times the updates (40 minutes of one core); may be interrupted
	$(BIN)/python -m pip install --quiet --group torch
	$(BIN)/python examples/paper/run.py --long

runtimes: .venv/built        ## run small files in other runtimes, pinned and installed into build/runtimes; rewrite their tables and docs/runtimes.md (an hour); NAMES: some of them
	PYTHONPATH=tests/support:tests/runtimes $(BIN)/python -P tests/runtimes/measure.py $(NAMES)

frameworks: .venv/built      ## the cells of other frameworks, pinned and installed into build/frameworks, against cnorm's; rewrite docs/frameworks.md (minutes); NAMES: some of them
	PYTHONPATH=tests/support:tests/frameworks $(BIN)/python -P tests/frameworks/check.py $(NAMES)

docs: .venv/built            ## the documents with the reference, as build/docs/index.html: no warning, no link to nowhere
	$(BIN)/python -m pip install --quiet --group docs --group torch
	$(BIN)/python -P -m sphinx --builder html --conf-dir docs --doctree-dir build/doctrees --quiet --fail-on-warning . build/docs

FUZZ_SECONDS ?= 120
FUZZ_SEED ?= 0
FUZZ_FLAGS = -max_total_time=$(FUZZ_SECONDS) -seed=$(FUZZ_SEED)
FUZZ_OPTIONS := ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
fuzz: private export CC := clang
fuzz: .venv/built            ## untrusted files, saved streams and a connection of the server under atheris, packed models and C entries under libFuzzer: clang, libclang-rt-dev; seed 0: a random one
	$(BIN)/python -m pip install --quiet atheris
	$(foreach target,onnx_loader model_file stream_state learner serve_connection,$(BIN)/python -P tests/fuzz/fuzz_$(target).py -runs=-1 $(FUZZ_FLAGS) &&) true
	$(call configure,fuzz,-Dfuzz=true --buildtype=debug --optimization=1 -Db_sanitize=address -Db_lundef=false)
	$(BIN)/meson compile -C build/fuzz fuzz_c_entries fuzz_model_open >/dev/null
	$(BIN)/python -P tests/fuzz/packed_models.py build/fuzz/packed_models
	$(FUZZ_OPTIONS) build/fuzz/fuzz_c_entries $(FUZZ_FLAGS) -max_len=2048
	$(FUZZ_OPTIONS) build/fuzz/fuzz_model_open $(FUZZ_FLAGS) -max_len=16384 build/fuzz/packed_models

malformed: .venv/built       ## 100,000 malformed messages to the server of `cnorm serve` (a minute)
	CNORM_MALFORMED=100000 $(BIN)/python -P -m pytest tests/serving/test_faults.py -k malformed

mutated: .venv/built         ## 100,000 mutated ONNX files through the validator and the loader, 200,000 streaming models through the loader (hours)
	$(BIN)/python -P tests/fuzz/mutated_onnx.py 100000
	$(BIN)/python -P tests/fuzz/mutated_onnx.py 200000 --models

cluster: .venv/built         ## the examples and tests with a local Ray and a local Dask cluster, in a folder of their own
	$(BIN)/python -m pip install --quiet --target build/cluster ray distributed
	PYTHONPATH=build/cluster $(BIN)/python -P -m pytest -q tests/cluster

# The editable install, whose build is RELEASE, rebuilds changed sources on import: edit C, then run pytest.
.venv/built: pyproject.toml requirements.lock
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --verbose --no-build-isolation --no-deps -Csetup-args=-Dstrict=true --editable .
	@touch $@

lock: .venv/built            ## rewrite requirements.lock: newest versions of the tools, with hashes
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --upgrade --generate-hashes --no-emit-index-url --no-annotate \
	  --custom-compile-command 'make lock' --group build --group test --group lint --output-file requirements.lock

clean:
	rm -rf .venv build demo_out bench_out
