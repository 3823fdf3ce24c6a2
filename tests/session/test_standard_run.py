"""The standard run has the committed digest on a CPU, whatever the number of threads."""

from __future__ import annotations

import torch

from jetrl.session.standard_run import DIGEST, standard_digest


def test_the_standard_run_has_its_digest() -> None:
    threads = torch.get_num_threads()
    assert standard_digest("cpu") == DIGEST
    assert torch.get_num_threads() == threads
