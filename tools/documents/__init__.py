"""What of docs/ is made from the sources: `python -m tools.documents docs`, or `make docs`. Tests
compare the two."""
