# make demo    a real model answers a prompt
# make test    the whole suite
# make lint    ruff and mypy
# make test-isas   the tests of kernels and models at each lower instruction set, and of kernels in the generic build
# make sanitize    the whole suite over a native library with AddressSanitizer and UndefinedBehaviorSanitizer
# Everything happens in .venv, with the versions of constraints.txt.

VENV ?= .venv
DEMO_PROMPT ?= Tell me in three sentences about a twig that wanted to be a tree.
export DEMO_PROMPT
PYTEST_ARGS ?=

# The first interpreter that is new enough; `make PYTHON=/path/to/python3 ...` takes another.
ifndef PYTHON
PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { command -v $$p; break; }; done)
endif

BIN := $(VENV)/bin
SANITIZED := $(VENV)-sanitized
GENERIC := $(VENV)-generic
# constraints.txt holds for the isolated build too: older pip reads the first variable there, newer pip the second.
PIP_INSTALL := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
	$(BIN)/python -m pip install --disable-pip-version-check
# $(call install_beside,ENVIRONMENT,NAME=VALUE): the library, built with an option, in an environment of its own, which sees
# the packages of .venv.
define install_beside
	$(BIN)/python -m venv --without-pip $(1)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > "$$($(1)/bin/python -c \
		"import sysconfig; print(sysconfig.get_path('purelib'))")/packages.pth"
	$(subst -m pip,-m pip --python $(1)/bin/python,$(PIP_INSTALL)) --no-deps \
		--config-settings=build-dir=build/$(notdir $(1)) --config-settings=cmake.define.$(2) --editable .
endef
NATIVE_SOURCES := CMakeLists.txt pyproject.toml constraints.txt $(shell find csrc -type f)

.PHONY: help demo test test-isas sanitize bench lint clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo    set up $(VENV), fetch a small model and let it answer a prompt (DEMO_PROMPT=...)'
	@echo 'make test    set up $(VENV) and run the whole suite (PYTEST_ARGS=...)'
	@echo 'make test-isas  the tests of kernels and models at each lower instruction set and in the generic build'
	@echo 'make sanitize  the suite over a library with sanitizers (PYTEST_ARGS=...)'
	@echo 'make lint    ruff check, ruff format --check, mypy'
	@echo 'make bench   how fast this machine reads memory'
	@echo 'make clean   remove $(VENV), build products and caches of tools'
	@echo 'Python: $(or $(PYTHON),none found that is 3.11 or later; set PYTHON=/path/to/python3)'

demo: $(VENV)/.installed
	$(BIN)/kvist pull smollm2-135m
	$(BIN)/kvist run --model smollm2-135m "$$DEMO_PROMPT"

test: $(VENV)/.installed-dev
	@for model in smollm2-135m gemma3-270m; do \
		$(BIN)/kvist pull $$model \
		|| echo "WARNING: $$model could not be fetched: the tests that need it will be SKIPPED" >&2; \
	done
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# What a kernel's result can change, at each instruction set below the richest that this CPU has; `KVIST_MAX_ISA=avx2 make
# test` runs the whole suite at one.
ISA_TESTS := tests/kernels tests/cache tests/attention tests/models tests/engine tests/loading/test_quantised_weights.py \
	tests/test_promise_same_answer_attention.py tests/test_promise_same_answer.py

test-isas: $(VENV)/.installed-dev
	@for isa in $$($(BIN)/python -c "from kvist.kernels import native; print(*native.available_isas()[:-1])"); do \
		echo "KVIST_MAX_ISA=$$isa"; \
		KVIST_MAX_ISA=$$isa $(BIN)/python -m pytest -q -k 'not real' $(PYTEST_ARGS) $(ISA_TESTS) || exit 1; \
	done
	$(call install_beside,$(GENERIC),KVIST_ISAS=generic)
	$(GENERIC)/bin/python -m pytest -q $(PYTEST_ARGS) tests/kernels

# Leaks are not looked for: the interpreter and PyTorch keep much until they end.
sanitize: $(VENV)/.installed-dev
	$(call install_beside,$(SANITIZED),KVIST_SANITIZE=ON)
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 $(SANITIZED)/bin/python -m pytest $(PYTEST_ARGS)

bench: $(VENV)/.installed
	$(BIN)/kvist bench bandwidth

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Installed editable: Python sources are used where they lie, so only what is compiled or declared asks for a new install.
$(VENV)/.installed: $(NATIVE_SOURCES) | $(VENV)/pyvenv.cfg
	$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: $(NATIVE_SOURCES) | $(VENV)/pyvenv.cfg
	$(PIP_INSTALL) --config-settings=cmake.define.KVIST_WERROR=ON --editable '.[dev]'
	@touch $(VENV)/.installed $@

$(VENV)/pyvenv.cfg:
	@test -n "$(PYTHON)" || { echo 'Kvist needs Python 3.11 or later: install it, or set PYTHON=/path/to/python3' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo '$(PYTHON) is not Python 3.11 or later: set PYTHON=/path/to/python3' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' \
		|| { echo '$(PYTHON) has no venv module: install it (Debian: python3-venv)' >&2; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' \
		|| { echo '$(PYTHON) has no C headers: install them (Debian: python3-dev)' >&2; exit 1; }
	@$${CXX:-c++} --version >/dev/null 2>&1 \
		|| { echo 'No C++ compiler: install GCC 11, Clang 12 or later (Debian: g++), or set CXX' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) $(SANITIZED) $(GENERIC) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
