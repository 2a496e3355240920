# Shortcuts for the commands that README.md and CONTRIBUTING.md list.

.PHONY: install test lint train
install:
	pip install -r requirements-dev.txt
test:
	python -m pytest
lint:
	ruff check . && ruff format --check .
train:
	python train.py config/shakespeare_char.py
