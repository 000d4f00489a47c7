# Everything happens in a local virtual environment, .venv. TORCH=0 leaves torch out: rows and tests that need it then say so.
PYTHON ?= python3
TORCH ?= 1
SECONDS ?= 600
ROUNDS ?= 500
WORKERS ?= 1

PY := .venv/bin/python
comma := ,
EXTRAS := test,check$(if $(filter 1,$(TORCH)),$(comma)bench)
NATIVE := $(wildcard native/core/* native/binding/*) CMakeLists.txt

.PHONY: help demo test check bench bars stream-bars soak fuzz venv format clean

help:
	@echo "make demo    a real RL run through a folder as the store, with two followers"
	@echo "make test    set everything up and run the tests"
	@echo "make check   ruff, mypy, import-linter, clang-format"
	@echo "make bench   the table of the README, on every run of the corpus"
	@echo "make bars    every number of docs/benchmarks.md"
	@echo "make stream-bars  the stream's numbers of docs/benchmarks.md"
	@echo "make soak    processes killed at random, ROUNDS=$(ROUNDS)"
	@echo "make fuzz    fuzz the readers for SECONDS=$(SECONDS)"

venv: .venv/installed

.venv/installed: pyproject.toml constraints.txt benchmarks/corpus/requirements.txt $(NATIVE)
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

demo: venv
	$(PY) benchmarks/demo.py

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

bars: venv
	$(PY) benchmarks/find_corpus.py .bench/corpus
	$(PY) benchmarks/bars.py .bench/corpus --json .bench/bars.json

stream-bars: venv
	$(PY) benchmarks/find_corpus.py .bench/corpus
	$(PY) benchmarks/stream_bars.py .bench/corpus --json .bench/stream_bars.json

soak: venv
	OMP_NUM_THREADS=1 $(PY) benchmarks/soak/run.py --rounds $(ROUNDS)

fuzz: venv
	-$(PY) -m pip install --quiet --disable-pip-version-check atheris
	$(PY) fuzz/run.py --seconds $(SECONDS)

clean:
	rm -rf .venv build .bench .fuzz
