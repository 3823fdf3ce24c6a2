"""Images of rows, and the task `shapes`: questions about drawn shapes, for models with images."""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
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
_DRAWS = 1000  # without a new prompt, after which all are taken to be found


def row_images(
    row: Mapping[str, Any], where: str, folder: Path, checked: dict[bytes | Path, Image]
) -> tuple[Image, ...]:
    """Return the images of a row: paths below `folder`, bytes, pictures of Pillow, or a list.

    Images of bytes and paths in `checked` are not read again; others are added to it.
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
        _image(item, column if item is value else f"{column}, number {number}", folder, checked)
        for number, item in enumerate(items)
    )


def _image(value: Any, where: str, folder: Path, checked: dict[bytes | Path, Image]) -> Image:
    if isinstance(value, Mapping):  # as `datasets` stores them
        value = value.get("bytes") or value.get("path")
    if isinstance(value, PIL.Image.Image):
        return encoded(value, where)
    if not isinstance(value, bytes | str):
        raise UserError(f"{where}: {value!r:.60} is no path, no bytes and no picture of Pillow")
    source = value if isinstance(value, bytes) else _path(value, where, folder)
    if source not in checked:
        checked[source] = checked_image(source, where)
    return checked[source]


def _path(name: str, where: str, folder: Path) -> Path:
    """Return the path of an image: a data file must not make files elsewhere part of a run."""
    root = folder.resolve()
    path = (root / name).resolve()
    if not path.is_relative_to(root):
        raise UserError(f"{where}: {name!r:.80} is outside of {folder}; copy the images into it")
    return path


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


def without_places(messages: Sequence[Message]) -> list[Json]:
    """Return messages without the places of images, which `with_places` may have added."""
    return [
        {**each, "content": each["content"] and each["content"].replace(IMAGE_MARK, "")}
        for each in messages
    ]


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
        """Return prompts such as `<image>How many circles?` with the answer `2`.

        No two prompts, of both splits together, have the same question and picture. Raises
        UserError if the options allow too few.
        """
        self.check_split(split)
        used: set[bytes] = set()
        held_out = self._unused("test", self.count // 10, used)
        return held_out if split == "test" else self._unused("train", self.count, used)

    def _unused(self, split: str, number: int, used: set[bytes]) -> list[Prompt]:
        """Draw prompts whose content is not in `used`, and add theirs to it."""
        draw = random.Random(f"{self.seed} {split}")
        prompts: list[Prompt] = []
        for n in range(number):
            kind = self.ask[n % len(self.ask)]
            for _ in range(_DRAWS):
                prompt = self._prompt(f"{split}-{n}", draw, kind)
                key = self.content_key(prompt)
                if key not in used:
                    break
            else:
                raise UserError(
                    f"task.options.count = {self.count}: after {len(used)} different prompts, no "
                    f"more of kind {kind!r} are found with task.options.most = {self.most}; lower "
                    "count (a tenth of it is held out in addition), or raise most"
                )
            used.add(key)
            prompts.append(prompt)
        return prompts

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
        drawn = sorted(zip(cells, names, colors, strict=False))
        if kind == "count":
            question, answer = f"How many {first}s?", str(names.count(first))
        elif kind == "color":
            question, answer = f"Which color is the {first}?", colors[0]
        else:
            question = f"Is the {first} left or right of the {second}?"
            answer = "left" if cells[0] % _CELLS < cells[1] % _CELLS else "right"
        text = f"{IMAGE_MARK}{question}" + ("\n" if self.format == "text" else "")
        digest = hashlib.blake2b(repr((self.size, drawn)).encode(), digest_size=32).digest()
        image = Image(partial(_canvas, self.size, drawn), self.size, self.size, digest)
        content = question_content(self.format, text)
        return Prompt(id=id, answer=answer, images=(image,), metadata={"ask": kind}, **content)

    def score(self, prompt: Prompt, completion: str) -> float:
        return float(completion.strip().rstrip(".").lower() == prompt.answer)

    def demonstration(self, prompt: Prompt) -> str | None:
        return prompt.answer

    def self_test(self) -> list[tuple[Prompt, str, float | None]]:
        prompt = self._prompt("self-test", random.Random(0), "count")
        return [(prompt, prompt.answer or "", 1.0), (prompt, "none", 0.0)]


def _canvas(size: int, drawn: Sequence[tuple[int, str, str]]) -> bytes:
    """Return the file of a picture of shapes, as (cell, shape, color)."""
    picture = PIL.Image.new("RGB", (size, size), (255, 255, 255))
    pen, side = ImageDraw.Draw(picture), size // _CELLS
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
    picture.save(file, "BMP")
    return file.getvalue()
