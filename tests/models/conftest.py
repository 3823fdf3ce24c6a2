from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerBase

from jetrl.models.tiny import train_bpe_tokenizer


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """A byte-level tokenizer of Qwen's kind with its chat template."""
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("the cat sat on the mat\n\n" * 20)
    return train_bpe_tokenizer([text], 300)
