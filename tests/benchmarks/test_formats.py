"""The benchmark of formats: errors that a format's steps explain."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from benchmarks import formats


def test_errors_of_normal_numbers_are_those_of_the_steps(tmp_path: Path) -> None:
    """INT8 in groups of 128: 127 steps for some 2.8 deviations, each off by 1 / sqrt(12)."""
    formats.main(["--out", str(tmp_path / "formats.json")])
    rows = json.loads((tmp_path / "formats.json").read_text())["rows"]
    normal = {row["format"]: row["normal"] for row in rows}
    assert abs(normal["INT8 1 x 128"] - 100 * 2.8 / 127 / 12**0.5) < 0.05
    assert normal["BF16"] < normal["INT8 1 x 128"] < normal["MXFP8"] < normal["NVFP4 1 x 16"]
    assert normal["NVFP4 1 x 16"] < normal["NVFP4 1 x 16, stochastic"] < 2 * normal["NVFP4 1 x 16"]
    # A row of normal numbers has few outliers, one of Student's t many: what clamping is for.
    heavy = {row["format"]: row["heavy"] for row in rows}
    assert heavy["FP4 rows, compensated"] < heavy["FP4 rows"] / 2 < heavy["FP4 rows, clamped"] / 2
    bits = {row["format"]: row["bytes"] * 8 for row in rows}
    assert (bits["NVFP4 1 x 16"], bits["MXFP4"], bits["MXFP8"]) == (4.5, 4.2496, 8.2496)


def test_the_error_is_relative_to_all_values() -> None:
    x = torch.full((16, 64), 2.0)
    assert formats.error(x, lambda x: x + 0.5) == 25.0
