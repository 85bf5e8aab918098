# make demo: the whole journey on real text.  make test: lint and tests.  make setup: only .venv.
# make slow: the long tests.  make check-te: the FP8 recipes with the real Transformer Engine.
.PHONY: setup demo test slow check-te
python := .venv/bin/python

setup:
	@sh scripts/setup.sh

demo: setup
	@$(python) -m pretrain.demo

test: setup
	@$(python) -m ruff check .
	@$(python) -m ruff format --check .
	@$(python) -m pytest -m "not slow" -q

slow: setup
	@$(python) -m pytest -m slow -q

check-te:
	@sh scripts/check_te.sh
