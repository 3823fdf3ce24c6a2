"""The parts of docs/ that are made from the sources: `python -m tools.documents docs`, `make docs`.

Tests compare the two.
"""
