# Shorthands; each line is a command to type as well.

.PHONY: install test lint train
install:
	pip install -r requirements-dev.txt
test:
	python -m pytest
lint:
	ruff check . && ruff format --check .
train:
	python train.py config/shakespeare_char.py
