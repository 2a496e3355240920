"""Data sets that are made rather than read: pairs, translations, docstrings, and music."""
