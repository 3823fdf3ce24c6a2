"""Image files: checked before they are decoded, and decoded in a process with limits.

A file is refused if its header promises more pixels than `MOST_PIXELS`, so that a small file cannot
fill memory. Formats are a fixed list, since Pillow has many old decoders. Only limited processes
read files, headers too: a decoder that crashes, hangs or fills the memory ends there, and is an
error of that one file. The pixels that come back are plain RGB.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import PIL.Image
from PIL.Image import Image as Picture

from jetrl.errors import UserError
from jetrl.types import Image, Json
from jetrl.untrusted import LimitedProcess, LimitError

MOST_PIXELS = 2**25  # 8K video has 33.2 million
MOST_BYTES = 2**26
PREVIEW_SIDE = 256
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
LIMIT_S, MEMORY_MIB = 30, 1024
"""CPU time and memory for the check of a file. Decoding it later has twice as much of both."""
_AS_RGB = ("RGB", "L", "P", "1")  # modes whose every value is a color without loss


def checked_image(source: bytes | Path, where: str, most_pixels: int | None = None) -> Image:
    """Return an image, given as the bytes of its file or as its path, after decoding it once.

    The bytes stay in memory; the file at a path is read again whenever it is needed. Raises
    UserError, with `where` in front, for a file that cannot be read, is no image or is damaged, has
    more than `most_pixels` (None: MOST_PIXELS), is animated, or has a mode that RGB does not hold.
    """
    data = source if isinstance(source, bytes) else _contents(source, where)
    if len(data) > MOST_BYTES:
        raise UserError(f"{where}: a file of more than {MOST_BYTES} bytes, the most that is read")
    most = MOST_PIXELS if most_pixels is None else most_pixels
    found = _answer(_checks(), data, {"most": most}, where)
    if "problem" in found:
        raise UserError(f"{where}: {found['problem']}")
    digest = _digest(data)
    kept = partial(_read_again, source, digest) if isinstance(source, Path) else data
    return Image(kept, found["width"], found["height"], digest)


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
    """Return the pixels of a checked image, in RGB.

    Raises UserError if its file can no longer be read or decoded.
    """
    size = 3 * image.width * image.height
    pixels = _answer(_decodes(), image.data, {}, "image", size)
    if len(pixels) != size:
        raise UserError(f"image: {len(pixels)} bytes of pixels for {image}")
    return PIL.Image.frombytes("RGB", (image.width, image.height), pixels)


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


# Two processes, so that a large file that is being checked does not hold up the engine of a server.
@functools.cache
def _checks() -> LimitedProcess:
    return LimitedProcess("jetrl.types.images:check", LIMIT_S, MEMORY_MIB)


@functools.cache
def _decodes() -> LimitedProcess:
    return LimitedProcess("jetrl.types.images:decode", 2 * LIMIT_S, 2 * MEMORY_MIB)


def _answer(
    process: LimitedProcess, data: bytes, request: Json, where: str, most_bytes: int = 0
) -> Any:
    try:
        return process.answer(json.dumps(request).encode(), data, most_bytes)
    except LimitError as error:
        raise UserError(f"{where}: cannot be decoded: {error}") from None


def check(request: Json, attached: bytes) -> Json:
    """Decode a file in the limited process: return its width and height, or its `problem`."""
    picture = _opened(attached)
    if isinstance(picture, str):
        return {"problem": picture}
    width, height = picture.size
    if width * height > request["most"]:
        return {"problem": f"{width} x {height} pixels; at most {request['most']} are read"}
    # A JPEG file of a camera may have a second picture (MPO); the first one is read.
    if (frames := getattr(picture, "n_frames", 1)) > 1 and picture.format != "MPO":
        return {"problem": f"an animation of {frames} frames; give one image"}
    try:
        picture.load()
    except MemoryError:
        raise
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error and others
        return {"problem": f"a damaged {picture.format} file: {error}"}
    opaque = picture.mode == "RGBA" and picture.getextrema()[3] == (255, 255)
    if not opaque and (picture.mode not in _AS_RGB or "transparency" in picture.info):
        mode = "transparent parts" if picture.has_transparency_data else f"mode {picture.mode}"
        return {"problem": f"the image has {mode}; convert it to RGB"}
    picture.convert("RGB")
    return {"width": width, "height": height}


def decode(request: Json, attached: bytes) -> bytes:
    """Decode a checked file in the limited process: return its pixels as rows of RGB."""
    pixels: bytes = _opened(attached).convert("RGB").tobytes()
    return pixels


def _opened(data: bytes) -> Any:
    """Return the picture of a file, not decoded yet, or words for what is wrong with it."""
    try:
        return PIL.Image.open(io.BytesIO(data), formats=FORMATS)
    except MemoryError:
        raise
    except PIL.Image.DecompressionBombError as error:
        return str(error)
    except Exception as error:  # as above
        known = ", ".join(FORMATS)
        # Pillow's own words name an object in memory.
        why = "" if isinstance(error, PIL.UnidentifiedImageError) else f": {error}"
        return f"not an image file ({known}){why}"
