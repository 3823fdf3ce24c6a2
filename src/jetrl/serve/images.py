"""Images in the messages of a request: parts of type `image_url`, as data in the URL itself.

Nothing is fetched: a URL of another kind would let clients read files and addresses that only the
server reaches.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence

from jetrl.errors import UserError
from jetrl.files import shown_value
from jetrl.types import Image, Json
from jetrl.types.images import MOST_PIXELS, checked_image

MOST_IMAGES = 64
"""Images in one request; together they have at most `MOST_PIXELS` pixels."""

_URL = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)
_FORM = "{'type': 'image_url', 'image_url': {'url': 'data:image/png;base64,...'}}"


def with_images(
    messages: Sequence[Json], blind: str | None
) -> tuple[list[Json], tuple[Image, ...]]:
    """Return messages with `{"type": "image"}` in the places of images, and the images in order.

    `blind` is the reason why there may be none. Raises UserError, which names the part, for one
    that is refused; its image is decoded only if the request keeps the limits.
    """
    images: list[Image] = []

    def read(part: object, where: str) -> object:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "image":
            raise UserError(f"{where}: a part of type 'image' has no image; give {_FORM}")
        if not isinstance(part, Mapping) or kind != "image_url":
            return part
        if blind is not None:
            raise UserError(f"{where}: {blind}, and this part is an image")
        if len(images) == MOST_IMAGES:
            raise UserError(f"{where}: a request has at most {MOST_IMAGES} images")
        left = MOST_PIXELS - sum(image.width * image.height for image in images)
        images.append(checked_image(_data(part, where), where, left))
        return {"type": "image"}

    read_messages = []
    for number, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            where = f"messages.{number}.content"
            parts = [read(part, f"{where}.{index}") for index, part in enumerate(content)]
            message = {**message, "content": parts}
        read_messages.append(message)
    return read_messages, tuple(images)


def _data(part: Mapping[str, object], where: str) -> bytes:
    """Return the bytes of an image's file."""
    image = part.get("image_url")
    own = {key for key, value in part.items() if value is not None} - {"type", "image_url"}
    if own or not isinstance(image, Mapping) or image.keys() - {"url", "detail"}:
        raise UserError(f"{where} = {shown_value(part)}: give {_FORM}")
    url, detail = image.get("url"), image.get("detail")
    if detail not in (None, "auto"):
        raise UserError(
            f"{where}.image_url.detail: only 'auto' is supported, not {shown_value(detail)}; the "
            "server's preprocessor_config.json says how large images are"
        )
    head = _URL.match(url) if isinstance(url, str) else None
    if head is None:
        raise UserError(
            f"{where}.image_url.url = {shown_value(url)}: only data:image/...;base64, is read, and "
            "nothing is fetched; send the image itself"
        )
    try:
        return base64.b64decode(head.string[head.end() :], validate=True)
    except ValueError as error:  # characters that are not of ASCII too
        raise UserError(f"{where}.image_url.url: not base64: {error}") from None
