"""Images of rows, and the task `shapes`: questions about drawn shapes, for models with images."""

from __future__ import annotations

import io
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import PIL.Image
from PIL import ImageDraw
from pydantic import Field

from jetrl.errors import UserError
from jetrl.tasks.base import Format, Task, question_content
from jetrl.types import IMAGE_MARK, IMAGE_MARKS, Image, Json, Message, Prompt
from jetrl.types.images import checked_image, encoded

COLUMNS = ("images", "image")
"""The columns of a row that have images."""
COLORS = {"red": (220, 30, 30), "green": (20, 150, 50), "blue": (30, 60, 220)}
SHAPES = ("circle", "square", "triangle")
Asked = Literal["count", "color", "place"]
_CELLS = 3  # of each side of the canvas; one shape fits into a cell


def row_images(row: Mapping[str, Any], where: str, folder: Path) -> tuple[Image, ...]:
    """Return the images of a row: paths below `folder`, bytes, pictures of Pillow, or a list.

    Raises UserError that names the row and the column of one that cannot be read.
    """
    given = [column for column in COLUMNS if row.get(column)]
    if len(given) > 1:
        raise UserError(f"{where}: has both columns {' and '.join(given)}; keep one of them")
    if not given:
        return ()
    value = row[given[0]]
    column = f"{where}: column {given[0]!r}"
    items = value if isinstance(value, list | tuple) else [value]
    return tuple(
        _image(item, column if item is value else f"{column}, number {number}", folder)
        for number, item in enumerate(items)
    )


def _image(value: Any, where: str, folder: Path) -> Image:
    if isinstance(value, Mapping):  # as `datasets` stores them
        value = value.get("bytes") or value.get("path")
    if isinstance(value, PIL.Image.Image):
        return encoded(value, where)
    if isinstance(value, bytes):
        return checked_image(value, where)
    if not isinstance(value, str):
        raise UserError(f"{where}: {value!r:.60} is no path, no bytes and no picture of Pillow")
    # A data file must not make files elsewhere part of a run.
    root = folder.resolve()
    path = (root / value).resolve()
    if not path.is_relative_to(root):
        raise UserError(f"{where}: {value!r:.80} is outside of {folder}; copy the images into it")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{where}: {path}: {error.strerror or error}") from None
    return checked_image(data, where)


def with_places(content: Json, images: Sequence[Image], where: str) -> Json:
    """Return the text or messages of a prompt with a place for each image (`IMAGE_MARKS`).

    Without any, all are put before the text, or before that of the first message of the user.
    Raises UserError if there are as many places as images neither before nor after.
    """
    texts = [str(each["content"] or "") for each in content.get("messages", ())]
    texts = texts or [content["text"]]
    count = sum(text.count(mark) for text in texts for mark in IMAGE_MARKS)
    if count == len(images):
        return content
    if count:
        raise UserError(
            f"{where}: {count} places of images ({IMAGE_MARK}) for {len(images)} images"
        )
    marks = IMAGE_MARK * len(images)
    if "text" in content:
        return {"text": marks + content["text"]}
    messages: list[Message] = list(content["messages"])
    first = next((i for i, each in enumerate(messages) if each["role"] == "user"), None)
    if first is None:
        raise UserError(f"{where}: no message of the user, before which images could be put")
    messages[first] = {**messages[first], "content": marks + str(messages[first]["content"])}
    return {"messages": tuple(messages)}


@dataclass(kw_only=True, eq=False)
class Shapes(Task):
    """Drawn shapes, with questions about their number, color and place; needs no download.

    A canvas of three by three cells has one to `most` shapes of three kinds and three colors. The
    questions are "How many circles?" (0 to `most`), "Which color is the square?" and "Is the square
    left or right of the circle?", about kinds of which the canvas has one. The reward is 1 for the
    number or the word, apart from spaces and case, else 0.

    Args:
        size: The side of the square canvas, in pixels.
        count: Prompts of the training split; the test split has a tenth of them.
        ask: Kinds of questions: some of `count`, `color`, `place`.
        format: "chat" wraps the question in a user message, "text" keeps it plain.
    """

    name = "shapes"
    stop = ("\n",)
    seed: int = 0
    size: Annotated[int, Field(ge=24, le=2048)] = 96
    count: Annotated[int, Field(ge=10, le=1_000_000)] = 2000
    most: Annotated[int, Field(ge=2, le=9)] = 4
    ask: Annotated[list[Asked], Field(min_length=1)] = field(
        default_factory=lambda: ["count", "color", "place"]
    )
    format: Format = "text"

    def prompts(self, split: str) -> list[Prompt]:
        """Return prompts such as `<image>How many circles?` with the answer `2`."""
        self.check_split(split)
        number = self.count if split == "train" else self.count // 10
        draw = random.Random(f"{self.seed} {split}")
        return [
            self._prompt(f"{split}-{n}", draw, self.ask[n % len(self.ask)]) for n in range(number)
        ]

    def _prompt(self, id: str, draw: random.Random, kind: str) -> Prompt:
        cells = draw.sample(range(_CELLS**2), draw.randint(2, self.most))
        first, second, *rest = draw.sample(SHAPES, len(SHAPES))
        names = [first, second, *(draw.choice(rest) for _ in cells[2:])]
        if kind == "place":  # the two must not be above each other
            columns = draw.sample(range(_CELLS), 2)
            cells[:2] = [_CELLS * draw.randrange(_CELLS) + column for column in columns]
            taken = {*cells[:2]}
            cells[2:] = [cell for cell in cells[2:] if cell not in taken]
        if kind == "count":
            names = [draw.choice(SHAPES) for _ in cells]
        colors = [draw.choice([*COLORS]) for _ in cells]
        drawn = list(zip(cells, names, colors, strict=False))
        if kind == "count":
            question, answer = f"How many {first}s?", str(names.count(first))
        elif kind == "color":
            question, answer = f"Which color is the {first}?", colors[0]
        else:
            question = f"Is the {first} left or right of the {second}?"
            answer = "left" if cells[0] % _CELLS < cells[1] % _CELLS else "right"
        text = f"{IMAGE_MARK}{question}" + ("\n" if self.format == "text" else "")
        image = self._canvas(drawn)
        content = question_content(self.format, text)
        return Prompt(id=id, answer=answer, images=(image,), metadata={"ask": kind}, **content)

    def _canvas(self, drawn: Sequence[tuple[int, str, str]]) -> Image:
        """Return a picture of shapes, as (cell, shape, color)."""
        picture = PIL.Image.new("RGB", (self.size, self.size), (255, 255, 255))
        pen, side = ImageDraw.Draw(picture), self.size // _CELLS
        edge = max(1, side // 8)
        for cell, shape, color in drawn:
            left, top = cell % _CELLS * side + edge, cell // _CELLS * side + edge
            right, bottom = left + side - 2 * edge, top + side - 2 * edge
            if shape == "circle":
                pen.ellipse((left, top, right, bottom), fill=COLORS[color])
            elif shape == "square":
                pen.rectangle((left, top, right, bottom), fill=COLORS[color])
            else:
                corners = [(left, bottom), (right, bottom), ((left + right) // 2, top)]
                pen.polygon(corners, fill=COLORS[color])
        file = io.BytesIO()
        picture.save(file, "BMP")  # the same bytes with every version of zlib
        return Image(file.getvalue(), self.size, self.size)

    def score(self, prompt: Prompt, completion: str) -> float:
        return float(completion.strip().rstrip(".").lower() == prompt.answer)

    def demonstration(self, prompt: Prompt) -> str | None:
        return prompt.answer

    def self_test(self) -> list[tuple[Prompt, str, float | None]]:
        prompt = self._prompt("self-test", random.Random(0), "count")
        return [(prompt, prompt.answer or "", 1.0), (prompt, "none", 0.0)]
