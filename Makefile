# make chat and make test are all a newcomer needs; every target does only what is still to do.
SHELL    := /bin/bash
PYTHON   ?= python3
VENV     := .venv
PY       := $(VENV)/bin/python
PIP      := $(PY) -m pip --disable-pip-version-check -q
BUILD    := build/editable
STAMPS   := build/stamps
JOBS     ?= $(shell nproc 2>/dev/null || echo 2)
CMAKE    := $(VENV)/bin/cmake
CMAKE_ARGS_EXTRA ?=
# What the libraries compute on beside the CPU; what was said last stays until something else is said.
BACKEND            ?= $(shell sed -n 1p $(STAMPS)/backend 2>/dev/null | grep . || echo cpu)
CUDA_ARCHITECTURES ?= $(shell sed -n 2p $(STAMPS)/backend 2>/dev/null)
PATCHED  := build/patches-checkout
SANITIZE := address,undefined

NATIVE_SOURCES := CMakeLists.txt $(shell find native -type f 2>/dev/null) $(wildcard patches/*)

.DEFAULT_GOAL := help
.PHONY: help setup chat test check fix bench native upstream sanitize golden clean \
        patches-checkout patches-refresh patches-check FORCE

help:             ## this list
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 20

chat: setup       ## open a chat with the embedded model; P="text" or piped stdin: one answer
	@$(VENV)/bin/speculoe-local chat $(if $(P),-p "$$P") $(ARGS)
export P

setup: $(STAMPS)/native $(STAMPS)/embedded ## .venv, libraries, embedded model; BACKEND=cpu, vulkan, cuda or auto
test: setup $(STAMPS)/dev $(STAMPS)/node $(STAMPS)/lm-eval $(STAMPS)/upstream ## everything the tests need, then the whole suite
	BACKEND=$$(sed -n 1p $(STAMPS)/backend) $(PY) -m pytest -q $(ARGS)

bench: setup $(STAMPS)/upstream ## our decode loop beside the unpatched library's
	$(VENV)/bin/speculoe-local bench $(ARGS)

check: $(STAMPS)/native $(STAMPS)/dev build/typeroot ## ruff, mypy, clang-format, patches; changes nothing
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy -p speculoe_local
	$(VENV)/bin/clang-format --dry-run --Werror $(shell find native -name '*.h' -o -name '*.cpp')
	$(PY) patches/source.py check

fix: $(STAMPS)/dev ## let ruff and clang-format change files
	$(VENV)/bin/ruff check --fix -q .
	$(VENV)/bin/ruff format -q .
	$(VENV)/bin/clang-format -i $(shell find native -name '*.h' -o -name '*.cpp')

native: $(STAMPS)/native ## rebuild libspeculoe after a change in native/
upstream: $(STAMPS)/upstream ## the unpatched library, to compare with

patches-checkout: ## build/patches-checkout: the pin as a git repository, one commit per patch
	$(PYTHON) patches/source.py checkout $(PATCHED)
patches-refresh: ## its commits back into patches/
	$(PYTHON) patches/source.py refresh $(PATCHED)
patches-check: ## headers, budget, and that the series applies to the pin
	$(PYTHON) patches/source.py check

clean: ## forget everything that was built
	rm -rf build $(VENV)

# --- what the targets stand on

$(STAMPS)/venv: pyproject.toml constraints.txt patches/PIN
	@mkdir -p $(STAMPS) && rm -f $@
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "setup 1/4: Python packages"
	@$(PIP) install -c constraints.txt 'pip>=25.1' cmake ninja 'scikit-build-core>=1.1'
	@# The bindings alone: the libraries are ours. Built from the archive that the libraries come from.
	@archive=$$($(PY) patches/source.py archive) && \
	 CMAKE_ARGS="-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF" $(PIP) install -c constraints.txt "$$archive"
	@touch $@

$(STAMPS)/editable: $(STAMPS)/venv
	@echo "setup 2/4: speculoe-local, editable"
	@$(PIP) install -c constraints.txt --no-build-isolation -C cmake.args=-DSPECULOE_LIBRARIES=OFF -e '.[embedded]'
	@touch $@

# Written only when the choice changes, so that only then the libraries are built again; the CPU's are not.
$(STAMPS)/backend: FORCE
	@scripts/backends choose $@ "$(BACKEND)" "$(CUDA_ARCHITECTURES)"
FORCE:

$(STAMPS)/native: $(STAMPS)/backend $(STAMPS)/editable $(NATIVE_SOURCES)
	@echo "setup 3/4: llama.cpp with patches, and libspeculoe ($(JOBS) jobs; minutes when cold)"
	@scripts/backends packages $(STAMPS)/backend $(CURDIR)/$(PY)
	@given=$$(scripts/backends options $(STAMPS)/backend $(CURDIR)/$(PY)) && mapfile -t given <<< "$$given" && \
	 $(CMAKE) -G Ninja -S . -B build/native -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/bin/ninja \
	   -DPython3_EXECUTABLE=$(CURDIR)/$(PY) -DSPECULOE_LIBRARIES=ON "$${given[@]}" $(CMAKE_ARGS_EXTRA) > build/native-configure.log 2>&1 \
	   || { tail -n 20 build/native-configure.log; exit 1; }
	@NINJA_STATUS='[%f/%t] ' $(CMAKE) --build build/native -j $(JOBS) | scripts/progress build/native-build.log
	@site=$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("platlib"))') && \
	 $(CMAKE) --install build/native --component speculoe --prefix "$$site" > /dev/null && \
	 scripts/backends prune $(STAMPS)/backend "$$site/speculoe_local/runtime/lib"
	@touch $@

$(STAMPS)/embedded: $(STAMPS)/native $(wildcard convert/data/*) convert/embedded.py
	@echo "setup 4/4: the embedded model"
	@$(PY) -c 'from speculoe_local.convert.embedded import embedded_model; print(embedded_model())'
	@touch $@

$(STAMPS)/dev: $(STAMPS)/editable
	@echo "tests: Python packages"
	@$(PIP) install -c constraints.txt --group dev
	@touch $@

# Clients that the server is tested with: npm's, and one whose packages are too many for ours to live with.
$(STAMPS)/node: $(addprefix tests/server/clients/node/,package.json package-lock.json)
	@echo "tests: npm packages"
	@{ command -v node && command -v npm; } > /dev/null || { echo "node or npm is missing; install Debian's nodejs and npm, 18 or newer"; exit 1; }
	@mkdir -p $(STAMPS) build/node && cp $^ build/node && npm --prefix build/node ci --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

$(STAMPS)/lm-eval: tests/server/clients/lm-eval.txt constraints.txt
	@echo "tests: lm-eval, in build/lm-eval"
	@mkdir -p $(STAMPS)
	@$(PYTHON) -m venv --clear build/lm-eval
	@build/lm-eval/bin/python -m pip --disable-pip-version-check -q install -c constraints.txt -r tests/server/clients/lm-eval.txt
	@touch $@

$(STAMPS)/upstream: $(STAMPS)/venv patches/PIN CMakeLists.txt
	@echo "the unpatched library, to compare with ($(JOBS) jobs; minutes when cold)"
	@$(CMAKE) -G Ninja -S . -B build/upstream -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/bin/ninja \
	   -DPython3_EXECUTABLE=$(CURDIR)/$(PY) -DSPECULOE_UNPATCHED=ON $(CMAKE_ARGS_EXTRA) > build/upstream-configure.log 2>&1 \
	   || { tail -n 20 build/upstream-configure.log; exit 1; }
	@NINJA_STATUS='[%f/%t] ' $(CMAKE) --build build/upstream -j $(JOBS) | scripts/progress build/upstream-build.log
	@touch $@

# mypy cannot follow the editable install's import hook: give it a tree that looks like the wheel.
build/typeroot:
	@mkdir -p $@/speculoe_local
	@for folder in runtime convert hub server cli; do ln -sfn ../../../$$folder $@/speculoe_local/$$folder; done
	@printf '__version__: str\n' > $@/speculoe_local/__init__.pyi
	@touch $@/speculoe_local/py.typed
