"""Counts of a letter in several words, a task whose worked answers leave a choice.

    python -m benchmarks.letter_counts build/letters --steps 4 6

Writes the files of word_problems.py, with its options: --steps is the number of words, --most the
longest word's length. A demonstration takes the words in a random order, counts in one of four ways
(one without spelling the word) and adds in one of 12 or more: about 5 nats per word. So training
can find the reliable ways.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from benchmarks import word_problems

TEXT = """
accident address airplane alphabet although animal apartment attention balloon banana basket bedroom
birthday blanket butterfly calendar camera carpenter chocolate classroom committee computer
cucumber december dentist different dinosaur director elephant elevator engineer envelope evening
exercise february furniture garden giraffe grandmother grasshopper hamburger headache helicopter
holiday hospital important increase interesting internet january kangaroo kitchen language
lemonade letter library magazine medicine message mississippi mountain museum necessary necklace
neighbor newspaper november opposite orange parallel passenger pencil pepper pineapple possession
potato president professor railroad rectangle remember restaurant sandwich scissors seventeen
sleeping somewhere spaghetti strawberry successful suitcase sunflower teacher telephone television
temperature tennessee tomato tomorrow understand university umbrella vegetable weekend yesterday
"""
WORDS = TEXT.split()


def count(r: random.Random, letter: str, word: str, n: int) -> str:
    """Return the count of a letter in a word, in a random way, and its sum with n."""
    seen, numbered = 0, []
    for each in word:
        seen += each == letter
        numbered.append(f"{each}{seen}" if each == letter else each)
    marked = [each.upper() if each == letter else each for each in word]
    spelled = r.choice(("", " ".join(word), " ".join(marked), " ".join(numbered)))
    return f"{word}{spelled and f': {spelled}'} has {seen}{word_problems.worked(r, n, seen)}."


def letters(r: random.Random, steps: Sequence[int], most: int) -> dict[str, str]:
    """Return a problem: how often a letter is in some words, of which up to two are without it."""
    letter, n, work, num_without = r.choice("aeinorst"), 0, [], r.randrange(3)
    short = [word for word in WORDS if len(word) <= most]
    words = r.sample([word for word in short if letter not in word], num_without)
    words += r.sample([word for word in short if letter in word], r.randint(*steps) - num_without)
    r.shuffle(words)
    for word in r.sample(words, len(words)):
        work.append(count(r, letter, word, n))
        n += word.count(letter)
    question = f"How many times is the letter {letter} in these words: {', '.join(words)}?"
    return word_problems.row([], question, work, n)


KINDS = {"letters": letters}

if __name__ == "__main__":
    word_problems.main(KINDS)
