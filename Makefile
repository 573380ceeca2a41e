# Two commands do everything on a fresh machine with python3 and make:  make demo  and  make test
PYTHON ?= python3
BIN := .venv/bin
RUN := recipes/classifier_docstrings.yaml

.PHONY: demo test test-cluster test-soak test-s3 test-tensorflow test-dist lint docs gallery dist bench bench-gpu bench-topics bench-plan bench-plan-local clean

demo: .venv/ready
	@echo "── the run file, every value and where it came from"
	$(BIN)/paceline explain $(RUN)
	@echo "── measure this machine, about 20 s: the plan is then made for it"
	$(BIN)/paceline calibrate --ranks 1,2
	@echo "── before anything is trained: does a second rank pay on this machine?"
	$(BIN)/paceline plan $(RUN) --devices 1,2
	@echo "── train on 2 local ranks"
	$(BIN)/paceline train $(RUN) parallel.ranks=2
	@echo "── prove that 1 rank and 2 ranks give the same answer"
	$(BIN)/paceline check $(RUN) --ranks 1,2
	@echo "── did it pay? 1 and 2 ranks in turns, and where the time goes"
	$(BIN)/paceline measure $(RUN) --ranks 1,2 --steps 16 --repeats 2
	@echo "── the page for the people who pay for it"
	$(BIN)/paceline report runs/docstrings-measure --out report

# Two processes share the files of tests: most tests keep one core busy, whatever they start. In the order of their names
# the long files, tests/dist, come first, so that no core is idle at the end.
test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# What takes hours: many examples of what  make test  tries with a few, a thousand faults in running trainings (FAULTS=100
# tries fewer), and hostile pages in a browser.
test-soak: .venv/ready-dev
	$(BIN)/python -m pytest tests/soak --import-mode=importlib -rA
	EXAMPLES=300 $(BIN)/python -m pytest tests/unit/reports/test_consistency.py

# Twenty kills while checkpoints are sent to an S3 server on this machine, which forgets the run each time. The server is
# kept apart: it needs an older python-dateutil.
test-s3: .venv/ready-dev
	mkdir -p build/s3
	sed '/^python-dateutil==/d' constraints.txt > build/s3/constraints.txt
	test -d build/s3/moto || \
	  $(BIN)/python -m pip install -q --disable-pip-version-check --target build/s3 -c build/s3/constraints.txt \
	  'moto[server]' s3fs
	PYTHONPATH=build/s3 $(BIN)/python tests/soak/s3_kills.py

# On a Slurm of two nodes, which is started on this machine and stopped again; three at once, since jobs mostly wait.
# What measures or has deadlines comes by itself. It needs root.
CLUSTER := slurmctld slurmd slurm-client munge openmpi-bin iproute2
TIMED := $(addprefix tests/cluster/,test_doctor.py test_silent_ranks.py)
test-cluster: .venv/ready-dev
	dpkg -s $(CLUSTER) >/dev/null 2>&1 || \
	  { apt-get update -qq && apt-get install -y -qq --no-install-recommends $(CLUSTER); }
	$(BIN)/python -m pytest tests/cluster $(TIMED:%=--ignore=%) --import-mode=importlib -rA -n 3 --dist loadfile
	$(BIN)/python -m pytest $(TIMED) --import-mode=importlib -rA

# Scripts for Horovod's TensorFlow and Keras parts, in an environment of their own: TensorFlow needs an older h5py.
test-tensorflow:
	test -x build/tensorflow/bin/python || $(PYTHON) -m venv build/tensorflow
	sed '/^h5py==/d' constraints.txt > build/tensorflow/constraints.txt
	build/tensorflow/bin/python -m pip install -q --disable-pip-version-check -c build/tensorflow/constraints.txt \
	  -e '.[tensorflow]' pytest tf_keras
	build/tensorflow/bin/python -m pytest tests/with_tensorflow --noconftest -rA

lint: .venv/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, in build/site: it needs no network when it is read, and ends with the first link that leads nowhere.
docs:
	test -x build/venv/bin/python || $(PYTHON) -m venv build/venv
	build/venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -r docs/requirements.txt
	build/venv/bin/python docs/site.py

# What docs/gallery.md shows, run here for the site: DATA=FOLDER has the data sets that it names.
gallery: .venv/ready-dev
	$(BIN)/python docs/gallery.py $(DATA)

# Wheel and sdist, in dist/; test-dist installs the wheel into an empty environment and runs the demo from it.
dist:
	test -x build/venv/bin/python || $(PYTHON) -m venv build/venv
	build/venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -r docs/requirements.txt
	rm -rf dist
	build/venv/bin/python -m build
	build/venv/bin/python -m twine check --strict dist/*

test-dist: dist
	PYTHON=$(PYTHON) bash tests/release/install_wheel.sh

# DATA=FOLDER names a folder with AG News; without it the CPU benchmark uses docstrings. The first time a baseline of this
# machine is written, and later ones end with exit code 1 where a step is slower or the answer is another.
bench: .venv/ready-dev
	$(BIN)/python benchmarks/classifier_cpu.py $(DATA)
	mkdir -p .cache
	$(BIN)/paceline measure $(RUN) --ranks 1,2 --repeats 5 --baseline .cache/speed.json

bench-gpu: .venv/ready-dev
	$(BIN)/python benchmarks/classifier_gpu.py $(or $(DATA),data/ag_news)

# The planner against published measurements (a table with a row per result), each group left out of the fit that prices
# it: writes the tables of docs/plan_accuracy.md and planner/bands.csv. And against this machine, which should be idle.
bench-plan: .venv/ready-dev
	mkdir -p .cache
	$(BIN)/python benchmarks/plan_bands.py $(or $(MEASUREMENTS),measurements.csv) --fits .cache/fits.json --write

bench-topics: .venv/ready-dev
	$(BIN)/python benchmarks/topics.py $(DATA)

bench-plan-local: .venv/ready-dev
	$(BIN)/python benchmarks/plan_local.py $(if $(SHAPED),--shaped)

# torch first, at the pinned version: what depends on it then finds it there. The tools come with the package, in one go.
INSTALL = $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt

.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) torch
	$(INSTALL) -e .
	touch $@

.venv/ready-dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) torch
	$(INSTALL) -e '.[dev]'
	touch .venv/ready $@

clean:
	rm -rf .venv build dist
