"""Evaluation of a model: losses, benchmarks, answers, comparisons, memorized text, and music."""
