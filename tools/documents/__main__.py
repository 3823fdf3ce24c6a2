"""Write the made parts of the documents again: `python -m tools.documents FOLDER`."""

import sys
from pathlib import Path

from tools.documents.algorithms import with_table
from tools.documents.elsewhere import with_names
from tools.documents.metrics import render_metrics_document
from tools.documents.settings import with_tables

folder = Path(sys.argv[1])
for name, remade in {
    "settings.md": with_tables,
    "algorithms.md": with_table,
    "coming-from.md": with_names,
    "metrics.md": lambda _: render_metrics_document(),
}.items():
    document = folder / name
    document.write_text(remade(document.read_text(encoding="utf-8")), encoding="utf-8")
