"""Text that a model wrote is shown as text, wherever it is shown.

On a page it is never markup, in a terminal never a control sequence; and decoded piece by piece it
is what it is decoded at once.
"""

import io
import json
import random
import unicodedata
from html.parser import HTMLParser

import pytest

from jetrl.rollout.stopping import StopRules
from jetrl.runs.console import Console
from jetrl.runs.format import visible
from jetrl.runs.report import _sample, text
from jetrl.runs.schemas import record_of
from jetrl.types import Completion, Prompt, PromptInputs, Sample, Score, StepStats, Turn

ALPHABET = (
    "<>&\"'`=/-!?[]{}\\ \n\t\r\0\x07\x08\x1b\x7f\x9b\u00ad\u200b\u200f\u2028\u202e\u2066"
    "\ufeff\ud800"
    "\ue000\U000e0001abz019é漢😀"
)
PIECES = ["<script>", "</pre>", "<!--", "-->", "]]>", "&lt;", "&#60;", "javascript:", "\x1b[2J"]
PIECES += [
    "\x1b]0;t\x07",
    "</style>",
    '" onload="x',
    "<svg onload=x>",
    "&NotExists;",
    "\x1b]8;;u\x07",
]


def texts(seed, count):
    rng = random.Random(seed)
    for _ in range(count):
        yield "".join(
            rng.choice(PIECES) if rng.random() < 0.2 else rng.choice(ALPHABET)
            for _ in range(rng.randint(0, 40))
        )


class Reader(HTMLParser):
    def __init__(self, source):
        super().__init__(convert_charrefs=True)
        self.tags, self.data, self.attributes = [], "", []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.data += data

    def handle_comment(self, data):
        raise AssertionError(f"a comment: {data!r}")


def test_text_of_a_page_is_text():
    for source in texts(1, 500):
        read = Reader(f"<pre>{text(source)}</pre>")
        assert read.tags == ["pre"]
        assert read.data == visible(source, newlines=True)
        quoted = Reader(f'<a title="{text(source)}">')
        assert quoted.tags == ["a"]
        assert len(quoted.attributes) == 1


def sample_of(a, b, c):
    said = Completion((1,), (-1.0,), "length", a, ((0, 1),), (Turn(b, c), Turn(c, None)), b)
    prompt = Prompt(id=a, messages=({"role": b, "content": c},), answer=b)
    return Sample(prompt, 0, PromptInputs((1,)), said, Score(0.5, {a: 1.0}), failure=c)


def test_samples_of_a_report_are_text():
    """Whatever prompt, turns, answers, parts and failures say."""
    sources = list(texts(6, 300))
    tags = {tuple(Reader(_sample(record_of(1, sample_of("x", "x", "x")))).tags)}
    for a, b, c in zip(sources, sources[1:], sources[2:], strict=False):
        record = json.loads(json.dumps(record_of(1, sample_of(a or "-", b or "-", c or "-"))))
        tags.add(tuple(Reader(_sample(record)).tags))
    assert len(tags) == 1


def control_characters(shown):
    return [c for c in shown if unicodedata.category(c) in ("Cc", "Cf", "Cs") and c != "\n"]


def test_text_of_a_terminal_is_text():
    for source in texts(3, 500):
        assert not control_characters(visible(source, newlines=True))
        assert "\n" not in visible(source)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_console_shows_any_completion(encoding):
    raw = io.BytesIO()
    console = Console(10, file=io.TextIOWrapper(raw, encoding=encoding, write_through=True))
    for number, source in enumerate(texts(4, 100), start=1):
        said = Completion((1,), (-1.0,), "stop", source)
        sample = Sample(Prompt(id="p", text=source), 0, PromptInputs((1,)), said, Score(0))
        console.samples(number, [sample])
        console.note(source)
        console.step(StepStats(number, {"reward/mean": 0.5, "eval/arithmetic/mean": 1.0}))
    console.close()
    assert not control_characters(raw.getvalue().decode(encoding))


def bytes_decoder(tokens):
    """A tokenizer of bytes, with invalid ones shown as the replacement character."""
    return bytes(tokens).decode("utf-8", "replace")


@pytest.mark.parametrize("seed", range(2))
def test_stop_strings_cut_where_the_whole_text_says(seed):
    """The text ends before the first stop string, whether it is decoded at once or token by token.

    It ends as soon as the stop string is complete in the text decoded at once.
    """
    rng = random.Random(seed)
    alphabet = ["a", "b", "\n", "é", "漢", "😀", "END", "</s>", " "]
    stops = ("END", "\n\n", "漢é", "ab")
    for number in range(200):
        said = "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 30))).encode()
        if rng.random() < 0.3:  # bytes that are no text
            said = bytes(rng.choice(said + b"\xff\xc3\xf0") for _ in said)
        watch = StopRules(max_tokens=1000, strings=stops, decode=bytes_decoder).text_watch()
        tokens, cut = [], None
        for byte in said:
            tokens.append(byte)
            cut = watch.update(tokens)
            if cut is not None:
                break
        shown = bytes_decoder(tokens)
        found = min((at for at in map(shown.find, stops) if at >= 0), default=None)
        assert (cut is None) == (found is None), (seed, number, said)
        if found is not None:
            assert cut == shown[:found], (seed, number, said)
