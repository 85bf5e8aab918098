# make demo: the whole journey on real text.  make test: lint and tests.  make setup: only .venv.
.PHONY: setup demo test slow
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
