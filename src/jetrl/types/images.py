"""Image files: checked before they are decoded, and decoded.

A file is refused if its header promises more pixels than `MOST_PIXELS`, so that a small file cannot
fill memory. Formats are a fixed list, since Pillow has many old decoders.
"""

from __future__ import annotations

import hashlib
import io
from functools import partial
from pathlib import Path
from typing import Any

import PIL.Image
from PIL.Image import Image as Picture

from jetrl.errors import UserError
from jetrl.types import Image

MOST_PIXELS = 2**25  # 8K video has 33.2 million
MOST_BYTES = 2**26
PREVIEW_SIDE = 256
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
_AS_RGB = ("RGB", "L", "P", "1")  # modes whose every value is a color without loss


def checked_image(source: bytes | Path, where: str, most_pixels: int = MOST_PIXELS) -> Image:
    """Return an image, given as the bytes of its file or as its path, after decoding it once.

    The bytes stay in memory; the file at a path is read again whenever it is needed. Raises
    UserError, with `where` in front, for a file that cannot be read, is no image or is damaged, has
    more than `most_pixels`, is animated, or has a mode that RGB does not hold.
    """
    data = source if isinstance(source, bytes) else _contents(source, where)
    if len(data) > MOST_BYTES:
        raise UserError(f"{where}: a file of more than {MOST_BYTES} bytes, the most that is read")
    picture = _opened(data, where)
    width, height = picture.size
    if width * height > most_pixels:
        raise UserError(f"{where}: {width} x {height} pixels; at most {most_pixels} are read")
    # A JPEG file of a camera may have a second picture (MPO); the first one is read.
    if (frames := getattr(picture, "n_frames", 1)) > 1 and picture.format != "MPO":
        raise UserError(f"{where}: an animation of {frames} frames; give one image")
    try:
        picture.load()
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error and others
        raise UserError(f"{where}: a damaged {picture.format} file: {error}") from None
    opaque = picture.mode == "RGBA" and picture.getextrema()[3] == (255, 255)
    if not opaque and (picture.mode not in _AS_RGB or "transparency" in picture.info):
        mode = "transparent parts" if picture.has_transparency_data else f"mode {picture.mode}"
        raise UserError(f"{where}: the image has {mode}; convert it to RGB")
    digest = _digest(data)
    if isinstance(source, Path):
        return Image(partial(_read_again, source, digest), width, height, digest)
    return Image(data, width, height, digest)


def _read_again(path: Path, digest: bytes) -> bytes:
    data = _contents(path, "image")
    if _digest(data) != digest:
        raise UserError(f"image: {path} has changed since the run read it; restore it, and resume")
    return data


def _contents(path: Path, where: str) -> bytes:
    try:
        if not path.is_file():
            missing = "not a file" if path.exists() else "No such file"
            raise UserError(f"{where}: {path}: {missing}; restore it, or mend its row")
        with path.open("rb") as file:
            return file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UserError(f"{where}: {path}: {error.strerror or error}") from None


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()


def decoded(image: Image) -> Picture:
    """Return the pixels of a checked image, in RGB."""
    return _opened(image.data, "image").convert("RGB")


def preview(image: Image) -> bytes:
    """Return a JPEG file of an image's pixels, at most `PREVIEW_SIDE` pixels high and wide."""
    picture, file = decoded(image), io.BytesIO()
    picture.thumbnail((PREVIEW_SIDE, PREVIEW_SIDE))
    picture.save(file, "JPEG", quality=85)
    return file.getvalue()


def encoded(picture: Picture, where: str) -> Image:
    """Return the PNG file of a picture in memory."""
    file = io.BytesIO()
    try:
        picture.save(file, "PNG")
    except (OSError, ValueError) as error:
        raise UserError(f"{where}: mode {picture.mode}: {error}; convert it to RGB") from None
    return checked_image(file.getvalue(), where)


def _opened(data: bytes, where: str) -> Any:
    try:
        return PIL.Image.open(io.BytesIO(data), formats=FORMATS)
    except PIL.Image.DecompressionBombError as error:
        raise UserError(f"{where}: {error}") from None
    except Exception as error:  # as above
        known = ", ".join(FORMATS)
        # Pillow's own words name an object in memory.
        why = "" if isinstance(error, PIL.UnidentifiedImageError) else f": {error}"
        raise UserError(f"{where}: not an image file ({known}){why}") from None
