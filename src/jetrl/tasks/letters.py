r"""Extraction of the chosen letter in a multiple-choice question.

The chosen letter is that of the last `\boxed{B}`, else of the last explicit statement ("Answer: B",
"the correct option is (B)"), else of the last weaker one ("option B is correct", "it is B", a last
line with only the letter). A letter counts only if followed by formatting, punctuation, the
choice's text or the end: A and I are words, C and E occur in formulas. Two letters count as none.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from jetrl.tasks.thoughts import answer_part

LETTERS = "ABCDEFGHIJ"
_SEVERAL = "several"  # two letters where one is expected
_FOLLOWING = 400  # characters inspected after a letter

_BOX = re.compile(
    r"\\(?:boxed|f(?:rame)?box)\s*"
    r"(?:\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\}){0,400})\}|([A-J])(?![A-Za-z0-9]))"
)
_BETWEEN_BOXES = re.compile(r"[\s$]*(?:[,;/&]|,?\s*\b(?:and|or)\b)[\s$]*")

# Formatting. A letter that is formatted by itself becomes (B), which no word and no formula is.
_FONT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:bf|rm|it|sf|cal)|mbox|bold(?:symbol)?|bm|"
    r"underline|emph|boxed|fbox|rm|bf)(?![a-z])\s*(?:\{([^{}]*)\}|([A-J])(?![A-Za-z0-9]))"
)
_LONE = re.compile(
    r"(?:\*\*|__|[*_`\"'\u2018\u201c$\[{]|\\[(\[]|<(?:b|strong|i|em)>)[ ]?"
    r"\(?([A-J])[ ]?[.):]*[ ]?"
    r"(?:\*\*|__|[*_`\"'\u2019\u201d$\]}]|\\[)\]]|</(?:b|strong|i|em)>)(?![A-Za-z0-9])"
)
_DROPPED = re.compile(r"\*+|__|[`\"\u201c\u201d$]|\\[()\[\]]|</?(?:b|strong|i|em)>")
_SPACES = re.compile(r"\\(?:q?quad(?![a-z])|[,;:! ])|~|[^\S\n]")

_LETTER = re.compile(r"\(\s*([A-J])\s*\)|([A-J])(?![A-Za-z0-9_'\u2019])")
_AHEAD = r"(?=\(?[A-J](?![A-Za-z0-9]))"  # where `_LETTER` is tried
_NAMED = r"(?i:(?:the\s+)?(?:option|choice|letter|alternative)\s*:?\s*)?"
_QUALITY = r"(?:correct|right|best|final|appropriate|suitable|accurate|valid)"
# What makes a formula of a letter in brackets, and what may follow a letter without them.
_FORMULA = re.compile(r"[ ]*(?:[=^_+*<>](?!/)|\\(?:times|cdot|to|cap|cup|in|subset)(?![a-z]))")
_ENDS = re.compile(
    r"[ ]*(?:$|[\n:;!)\]},]|\.(?![A-Za-z0-9])|</?[a-z]|\u2014)"
    r"|[ ]*[\u2600-\u27bf\u3000-\u9fff\U0001f300-\U0001faff]"  # pictures, Chinese
    r"|[ ]+[-\u2013][ ]|[ ]+\([^()\n]{2,}\)(?![ ]*[=^])"
    rf"|[ ]+is[ ]+(?:the[ ]+)?(?:{_QUALITY}|answer)\b"
    r"|[ ]+(?:because|since|as|which|due|given|based|rather|not|but|and|while|whereas)\b"
)
# Between two letters that are both given; the second kind may also begin a new clause.
_OR = re.compile(rf"[ ]*(?:,?[ ]*(?:and/)?or\b|/|\\?&|\+|\||\u6216)[ ]*{_NAMED}{_AHEAD}")
_AND = re.compile(
    rf"[ ]*(?:[,;]?[ ]*(?:and|nor)\b|[,;\u3001\u548c\u4e0e]|[-\u2013\u2014])[ ]*{_NAMED}{_AHEAD}"
)
_ASIDE = re.compile(rf"[ ]*\([ ]*(?:(?:or|and|&)[ ]*)?{_NAMED}([A-J])[ ]*\)")

_IS = (
    r"(?:is|was|(?:would|should|must|will|has\s+to|can\s+only)\s+(?:(?:therefore|thus|then)\s+)?be)"
)
_ADVERBS = r"(?:(?:therefore|thus|then|hence|indeed|most|[a-z]{3,12}ly)\b,?\s*){0,2}"
_STATED = re.compile(
    r"(?i:\banswer(?:\s+(?:key|choice|option|letter))?"
    rf"|\b{_QUALITY}\s+(?:option|choice|statement|response|one|alternative|selection))"
    r"(?i:\s+(?:to|for|of|in|here)\b[^.:\n]{0,60}?)?"
    rf"\s*(?:,?\s*(?i:{_ADVERBS}{_IS}\b)|[:=>\n]|[ ][-\u2013\u2014][ ])[\s:>#]*"
    rf"(?i:{_ADVERBS})[\s:]*{_NAMED}{_AHEAD}"
    rf"|(?m:^[^\w\n]*(?i:(?:final\s+)?answer)[ ]+{_NAMED}(?=\(?[A-J]\)?[^\w\n]*$))"
    r"|(?:\u7b54\u6848\s*(?:\u662f|\u4e3a|\u5e94\u4e3a|\u5e94\u8be5\u662f|\u9009)?"  # the answer is
    r"|(?:\u6545|\u5e94|\u5e94\u8be5|\u56e0\u6b64|\u6240\u4ee5|\u6b63\u786e)"  # therefore choose
    rf"\u9009(?:\u62e9|\u9879)?(?:\u662f|\u4e3a)?)\s*:?\s*(?:\u9009\u9879)?\s*{_AHEAD}"
)
_IMPLIED = re.compile(
    rf"(?i:\bit(?:\s+{_IS}|['\u2019]s)\s+{_ADVERBS}|\bnot\s+\(?[A-J]\)?,?\s+but\s+(?:rather\s+)?"
    r"|\b(?:choose|chose|select|selected|pick|picked|go\s+with|opt\s+for)\s+"
    r"|\b(?:corresponds\s+to|matches|match|which\s+is|that\s+is|namely)\s+"
    rf"(?:the\s+)?(?:option|choice|answer)\s+){_NAMED}{_AHEAD}"
)
_CALLED_RIGHT = re.compile(
    rf"\(?([A-J])\)?[ ]+(?i:{_IS}\s+{_ADVERBS}(?:the\s+)?(?:only\s+|most\s+)?)"
    rf"(?i:{_QUALITY}|answer)\b"
)
_SUPPOSED = re.compile(
    r"(?i:\b(?:if|whether|why|suppose|assume|assuming|check|see|were|not|nor|neither|or|and)\s+"
    r"(?:(?:that|we|you|i|to)\s+)?(?:option\s+|choice\s+)?)\(?$"
)
_LABEL = re.compile(r"^[^\w(]{0,4}(\(?[A-J])\s?[.):]", re.MULTILINE)
_LAST_LINE = re.compile(r"(?:^|\n)[^\w\n(]*(\(?[A-J]\)?)[ .!]*$")


def chosen_letter(completion: str, choices: Sequence[str] = ()) -> str | None:
    """Return the letter chosen by a completion; None if there is none or more than one.

    Given the texts of the choices, a letter may be followed by its own text: "Answer: B 12 cm".
    """
    said = answer_part(completion)
    if said is None:
        return None
    text = unicodedata.normalize("NFKC", said)
    letter = _in_boxes(text, choices)
    if letter is None:
        text = _plain(_BOX.sub(" ", text))
        letter = _last(_stated(text, choices)) or _last(_implied(text, choices))
    return None if letter == _SEVERAL else letter


def _last(found: Sequence[tuple[int, str]]) -> str | None:
    """Return the last letter found in the text."""
    return max(found)[1] if found else None


def _in_boxes(text: str, choices: Sequence[str]) -> str | None:
    """Return the letter of the last box with a letter, or several if boxes are joined."""
    boxes = list(_BOX.finditer(text))
    for place in range(len(boxes) - 1, -1, -1):
        box, before = boxes[place], boxes[place - 1] if place else None
        letter = _of_box(box, choices)
        if letter is None:  # a formula, or the choice's text
            continue
        joined = before and _BETWEEN_BOXES.fullmatch(text, before.end(), box.start())
        if before and joined and _of_box(before, choices) not in (None, letter):
            return _SEVERAL
        return letter
    return None


def _of_box(box: re.Match[str], choices: Sequence[str]) -> str | None:
    content = _plain(box[1] or box[2] or "").strip()
    lead = _STATED.search(content) or re.match(_NAMED, content)
    return _letter_at(content, lead.end() if lead else 0, choices)


def _stated(text: str, choices: Sequence[str]) -> list[tuple[int, str]]:
    """Return letters and positions of statements that name the answer."""
    found = ((lead.end(), _letter_at(text, lead.end(), choices)) for lead in _STATED.finditer(text))
    return [(place, letter) for place, letter in found if letter]


def _implied(text: str, choices: Sequence[str]) -> list[tuple[int, str]]:
    """Return letters and positions of statements that imply the answer."""
    found = []
    for lead in _IMPLIED.finditer(text):
        letter = _letter_at(text, lead.end(), choices)
        if letter and not _SUPPOSED.search(text[max(0, lead.start() - 30) : lead.start()]):
            found.append((lead.end(), letter))
    for called in _CALLED_RIGHT.finditer(text):
        if not _SUPPOSED.search(text[max(0, called.start() - 30) : called.start()]):
            found.append((called.start(), called[1]))
    whole = text.strip()
    alone = _LAST_LINE.search(text.rstrip())
    label = _LABEL.match(whole)
    if alone and not _LABEL.search(text[: alone.start()]):
        found.append((len(text), alone[1].strip("()")))
    elif label and "\n" not in whole:  # B. 12 cm
        letter = _letter_at(whole, label.start(1), choices)
        found += [(len(text), letter)] if letter else []
    return found


def _letter_at(text: str, start: int, choices: Sequence[str]) -> str | None:
    """Return the letter at a position; None if a word or formula begins there."""
    letter = _LETTER.match(text, start)
    if letter is None:
        return None
    name, end = letter[1] or letter[2], letter.end()
    for joined, is_clause in ((_OR, False), (_AND, True)):
        between = joined.match(text, end)
        other = between and _LETTER.match(text, between.end())
        if not between or not other or name in (other[1], other[2]):
            continue
        if not is_clause or _is_given(text, other):  # not: C, I think
            return _SEVERAL
    aside = _ASIDE.match(text, end)
    if aside and aside[1] != name:
        return _SEVERAL
    if _begins_with_a_choice(text, start, name, choices):
        return None
    if _stands(text, letter) or _followed_by_its_text(text, end, name, choices):
        return name
    return None


def _stands(text: str, letter: re.Match[str]) -> bool:
    """Return True if a letter is neither a word nor part of a formula."""
    if letter[1]:  # in brackets
        return not _FORMULA.match(text, letter.end())
    return _ENDS.match(text, letter.end()) is not None


def _is_given(text: str, letter: re.Match[str]) -> bool:
    """Return True if a letter after another letter and a comma is a second answer."""
    joined = any(joiner.match(text, letter.end()) for joiner in (_OR, _AND))
    return joined or _stands(text, letter)


def _begins_with_a_choice(text: str, start: int, name: str, choices: Sequence[str]) -> bool:
    """Return True if the text of another choice, such as `E. coli`, begins with the letter."""
    here = _spaced(text[start : start + _FOLLOWING])
    others = (c for letter, c in zip(LETTERS, choices, strict=False) if letter != name)
    return any(_begins(here, other) for other in others if len(other) > 2)


def _followed_by_its_text(text: str, end: int, name: str, choices: Sequence[str]) -> bool:
    own = dict(zip(LETTERS, choices, strict=False)).get(name, "")
    return bool(own.strip()) and _begins(_spaced(text[end : end + _FOLLOWING]), own)


def _begins(text: str, choice: str) -> bool:
    start = _spaced(_plain(choice))
    return bool(start) and text.startswith(start) and not text[len(start) :][:1].isalnum()


def _spaced(text: str) -> str:
    return " ".join(text.split()).casefold()


def _plain(text: str) -> str:
    """Remove fonts and markup; a letter formatted by itself becomes (B)."""
    for _ in range(4):  # nested fonts
        text, number = _FONT.subn(_without_font, text)
        if not number:
            break
    text = _LONE.sub(r"(\1)", _SPACES.sub(" ", text))
    return _DROPPED.sub("", text)


def _without_font(font: re.Match[str]) -> str:
    content = (font[1] or font[2] or "").strip()
    alone = re.fullmatch(r"\(?([A-J])\s?[.):]?", content)
    return f"({alone[1]})" if alone else f" {content} "
