"""Any text survives its way through the chat: what is decoded is what was said, turn by turn."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from jetrl.models.chat import decode, encode_prompt, encode_text, encode_turns
from jetrl.types import Prompt, Turn

CONTROL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
# Whole control tokens and pieces of them next to any text that UTF-8 can write.
PIECES = st.one_of(
    st.sampled_from([*CONTROL, "<|im_", "end|>", "\n", " ", "[", "}}"]),
    st.text(st.characters(codec="utf-8"), max_size=6),
)
TEXTS = st.lists(PIECES, max_size=5).map("".join)
CHECKED = settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def written(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    """The text of tokens, control tokens included."""
    return tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)


def control_tokens(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> list[str]:
    return [token for token in tokenizer.convert_ids_to_tokens(token_ids) if token in CONTROL]


@CHECKED
@given(text=TEXTS)
def test_a_text_that_is_encoded_as_text_has_no_control_token(chatml, text: str) -> None:
    token_ids = encode_text(chatml, text, as_text=True)
    assert control_tokens(chatml, token_ids) == []
    assert decode(chatml, token_ids) == text


@CHECKED
@given(
    question=TEXTS,
    said=st.lists(st.tuples(TEXTS, st.sampled_from(["user", "tool"]), TEXTS), max_size=3),
    last=TEXTS,
)
def test_a_conversation_is_read_back_turn_by_turn(
    chatml, question: str, said: list[tuple[str, str, str]], last: str
) -> None:
    """No words open or end a turn, and every span holds its own."""
    prompt = Prompt("p1", messages=({"role": "user", "content": question},))
    turns = [Turn(answer, {"role": role, "content": reply}) for answer, role, reply in said]
    token_ids = encode_prompt(chatml, prompt, plain_text="all").token_ids
    example = encode_turns(chatml, token_ids, [*turns, Turn(last)], plain_text="all", asked=prompt)

    assert written(chatml, token_ids) == (
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )
    begin = 0
    for (answer, role, reply), (start, end) in zip(said, example.environment, strict=True):
        assert written(chatml, example.completion[begin:start]) == f"{answer}<|im_end|>"
        assert written(chatml, example.completion[start:end]) == (
            f"\n<|im_start|>{role}\n{reply}<|im_end|>\n<|im_start|>assistant\n"
        )
        begin = end
    assert written(chatml, example.completion[begin:]) == f"{last}<|im_end|>"
    opened = ["<|im_end|>", "<|im_start|>"]
    whole = control_tokens(chatml, [*token_ids, *example.completion])
    assert whole == ["<|im_start|>", *opened * (1 + 2 * len(said)), "<|im_end|>"]


@CHECKED
@given(question=TEXTS, answer=TEXTS, reply=TEXTS)
def test_a_conversation_that_goes_on_is_the_prompt_of_its_next_turn(
    chatml, question: str, answer: str, reply: str
) -> None:
    """Sampling a turn after a reply sees the text of a prompt with all that was said."""
    first = {"role": "user", "content": question}
    prompt = Prompt("p1", messages=(first,))
    replied = {"role": "user", "content": reply}
    token_ids = encode_prompt(chatml, prompt, plain_text="all").token_ids
    turns = [Turn(answer, replied), Turn("")]
    example = encode_turns(chatml, token_ids, turns, plain_text="all", asked=prompt)
    ((_, end),) = example.environment
    whole = Prompt("p1", messages=(first, {"role": "assistant", "content": answer}, replied))
    wanted = encode_prompt(chatml, whole, plain_text="all").token_ids
    assert written(chatml, [*token_ids, *example.completion[:end]]) == written(chatml, wanted)
