"""Images of rows and of the task `shapes`; what cannot be read is refused by row and column."""

from __future__ import annotations

import io
import json
import pickle
import struct
import tracemalloc
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from jetrl.errors import UserError
from jetrl.models.vision import READERS
from jetrl.tasks import get_task, read_prompts
from jetrl.tasks.sandbox.scorer import _without_images
from jetrl.tasks.sandbox.worker import Item
from jetrl.tasks.shapes import COLORS
from jetrl.types import IMAGE_MARKS
from jetrl.types.images import decoded
from jetrl.untrusted import LimitedProcess, LimitError

PLACE = "<|vision_start|><|image_pad|><|vision_end|>"  # of Qwen-VL


def file_of(color: str = "red", mode: str = "RGB", kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    Pillow.new(mode, (8, 6), color).save(file, kind, **options)
    return file.getvalue()


def write(folder: Path, **row: Any) -> str:
    line = json.dumps({"prompt": "how many?", "answer": "5", **row})
    (folder / "train.jsonl").write_text(line + "\n")
    return str(folder)


def bomb() -> bytes:
    """A file of a few bytes whose header promises 2^34 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    header = struct.pack(">IIBBBBB", 2**17, 2**17, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b""))


@pytest.mark.parametrize(
    "row, text",
    [
        ({"image": "one.png"}, "<image>how many?"),  # TRL's layout: no place in the text
        ({"images": ["one.png", "two.png"]}, "<image><image>how many?"),
        ({"images": ["one.png"], "prompt": "<image>3+2?"}, "<image>3+2?"),  # verl's, EasyR1's
        ({"images": ["one.png", "two.png"], "prompt": "<image>or<image>?"}, "<image>or<image>?"),
        (
            {
                "images": ["one.png"],
                "prompt": [
                    {"role": "system", "content": "Look."},
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "A:"}, {"type": "image"}],
                    },
                ],
            },
            "A:<image>",
        ),
        ({"images": ["one.png"], "prompt": [{"role": "user", "content": "A"}]}, "<image>A"),
        ({"images": ["one.png", "two.png"], "prompt": f"A{PLACE}<image>"}, f"A{PLACE}<image>"),
        (
            {"images": ["one.png"], "prompt": [{"role": "user", "content": f"A{PLACE}"}]},
            f"A{PLACE}",
        ),
        ({"images": [], "image": None, "prompt": "a <image> tag"}, "a <image> tag"),
    ],
)
def test_layouts_of_rows(row: dict[str, Any], text: str, tmp_path: Path) -> None:
    for name, color in (("one", "red"), ("two", "blue")):
        (tmp_path / f"{name}.png").write_bytes(file_of(color))
    (prompt,) = read_prompts(get_task(write(tmp_path, **row)), "train")
    assert prompt.asked == text
    names = row["images"] if row.get("images") else [row["image"]] if row.get("image") else []
    assert [image.data for image in prompt.images] == [
        (tmp_path / name).read_bytes() for name in names
    ]
    assert not {"image", "images"} & prompt.metadata.keys() or not prompt.images
    item = _without_images(Item(prompt, "5"))
    assert isinstance(item, Item)
    assert item.prompt.images == ()


def test_every_family_has_its_place_among_those_of_rows() -> None:
    assert {reader.mark for reader in READERS.values()} == {*IMAGE_MARKS}


def test_files_in_tables_are_read_before_anything_decodes_them(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "images": datasets.List(datasets.Image()),
            "problem": datasets.Value("string"),
            "answer": datasets.Value("string"),
        }
    )
    rows = [
        {"images": [{"bytes": file_of(color), "path": None}], "problem": "<image>?", "answer": "5"}
        for color in ("red", "blue", "red")
    ]
    data = datasets.Dataset.from_list(rows, features=features)
    (tmp_path / "table").mkdir()
    data.to_parquet(str(tmp_path / "table" / "train.parquet"))
    datasets.DatasetDict(train=data).save_to_disk(str(tmp_path / "saved"))
    for folder in ("table", "saved"):
        task = get_task(str(tmp_path / folder))
        prompts = read_prompts(task, "train")
        files = [prompt.images[0].data for prompt in prompts]
        assert files == [file_of("red"), file_of("blue"), file_of("red")]
        keys = [task.content_key(prompt) for prompt in prompts]
        assert (keys[0] == keys[2], keys[0] == keys[1]) == (True, False)
    rows[1]["images"][0]["bytes"] = bomb()
    bad = datasets.Dataset.from_list(rows, features=features)
    datasets.DatasetDict(train=bad).save_to_disk(str(tmp_path / "bad"))
    with pytest.raises(UserError, match=r"train row 1: column 'images', number 0: .*pixels"):
        read_prompts(get_task(str(tmp_path / "bad")), "train")


def test_conversations_have_parts_of_images(tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(file_of())
    said = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": "5"},
    ]
    line = json.dumps({"messages": said, "answer": "5", "images": ["one.png"]})
    (tmp_path / "train.jsonl").write_text(line + "\n")
    task = get_task(str(tmp_path))
    (prompt,) = read_prompts(task, "train")
    assert prompt.asked == "<image>?"
    assert task.demonstration(prompt) is not None


@pytest.mark.parametrize(
    "data, message",
    [
        (b"no image", r"not an image file \([A-Z, ]+\)$"),
        (file_of()[:-30], "a damaged PNG file"),
        (bomb(), "(131072 x 131072|exceeds limit)"),
        (file_of("red", "RGBA"), None),  # opaque
        (file_of("#ff000080", "RGBA"), "transparent parts"),
        (file_of("red", "CMYK", "JPEG"), "mode CMYK"),
        (file_of(40000, "I;16"), "mode I;16"),  # type: ignore[arg-type]
        (
            file_of(kind="GIF", save_all=True, append_images=[Pillow.new("RGB", (8, 6), "blue")]),
            "an animation of 2 frames",
        ),
        (file_of(128, "L"), None),  # type: ignore[arg-type]
        (file_of(kind="JPEG"), None),
        (
            file_of(kind="MPO", save_all=True, append_images=[Pillow.new("RGB", (4, 3), "blue")]),
            None,
        ),
        (file_of(kind="WEBP", lossless=True), None),
    ],
)
def test_files_that_are_no_plain_image_are_named(
    data: bytes, message: str | None, tmp_path: Path
) -> None:
    (tmp_path / "a.img").write_bytes(data)
    task = get_task(write(tmp_path, images=["a.img"]))
    if message is None:
        (image,) = read_prompts(task, "train")[0].images
        assert (image.width, image.height, decoded(image).mode) == (8, 6, "RGB")
        return
    where = r"train.jsonl, line 1: column 'images', number 0: .*"
    with pytest.raises(UserError, match=where + message):
        read_prompts(task, "train")


@pytest.mark.parametrize(
    "row, message",
    [
        ({"image": "none.png"}, "column 'image': .*none.png: No such file; restore it, or mend"),
        ({"image": "."}, "column 'image': .*: not a file; restore it, or mend its row"),
        ({"image": "../a.png"}, "'../a.png' is outside of"),
        ({"image": 5}, "column 'image': 5 is no path"),
        ({"image": "a.png", "images": ["a.png"]}, "both columns images and image"),
        ({"image": "a.png", "prompt": "<image><image>?"}, "2 places of images.* for 1 images"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "no image comes with it"),
        (
            {
                "images": ["a.png"],
                "prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}],
            },
            "has the part .*give .'type': 'image'.",
        ),
        (
            {"image": "a.png", "prompt": [{"role": "tool", "content": "?"}]},
            "no message of the user",
        ),
        ({"video": "a.mp4"}, "column 'video' has pictures, sounds or videos"),
    ],
)
def test_rows_that_do_not_fit_are_named(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(file_of())
    with pytest.raises(UserError, match=f"train.jsonl, line 1: .*{message}"):
        read_prompts(get_task(write(tmp_path, **row)), "train")


def test_a_file_of_few_bytes_and_many_pixels_is_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jetrl.types.images.MOST_PIXELS", 47)
    (tmp_path / "a.png").write_bytes(file_of()[:-30])  # damaged, as decoding would tell
    with pytest.raises(UserError, match="8 x 6 pixels; at most 47"):
        read_prompts(get_task(write(tmp_path, image="a.png")), "train")


@pytest.mark.parametrize(
    "function, message",
    [
        ("hungry", "it takes too much memory"),
        ("endless", "it takes more than 0.5 s of CPU time"),
        ("crashing", r"its process ended \(-6\), for lack of memory or by a crash"),
    ],
)
def test_a_decoder_that_fails_is_an_error_of_one_file(
    function: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.png").write_bytes(file_of())
    task = get_task(write(tmp_path, images=["a.png"]))
    name = f"tests.tasks.decoders:{function}"
    with closing(LimitedProcess(name, 0.5, 256)) as process, monkeypatch.context() as patched:
        patched.setattr("jetrl.types.images._checks", lambda: process)
        where = r"train.jsonl, line 1: column 'images', number 0: cannot be decoded: "
        with pytest.raises(UserError, match=where + message):
            read_prompts(task, "train")
    (image,) = read_prompts(get_task(str(tmp_path)), "train")[0].images
    with closing(LimitedProcess(name, 0.5, 256)) as process:
        monkeypatch.setattr("jetrl.types.images._decodes", lambda: process)
        with pytest.raises(UserError, match=f"image: cannot be decoded: {message}"):
            decoded(image)


def test_bytes_go_to_the_limited_process_and_come_back() -> None:
    data = bytes(range(256)) * 2**12
    with closing(LimitedProcess("tests.tasks.decoders:short", 10, 256)) as process:
        assert process.answer(b'{"size": 1000000}', data, most_bytes=10**6) == data[: 10**6]
        with pytest.raises(LimitError, match="it gives more than 999 bytes"):
            process.answer(b'{"size": 1000}', data, most_bytes=999)
        assert process.answer(b'{"size": 1}', b"", most_bytes=1) == b""
        with pytest.raises(LimitError, match="attached"):
            process.answer(b'{"size": 1}')
        assert process.answer(b'{"size": 9}', b"\n7\n8", most_bytes=9) == b"\n7\n8"


def test_shapes_are_what_the_answers_say() -> None:
    task = get_task("shapes", count=60, seed=3)
    prompts = read_prompts(task, "train")
    assert [p.images for p in prompts] == [p.images for p in read_prompts(task, "train")]
    assert len({prompt.images[0].digest for prompt in prompts}) == 60
    assert not {p.images for p in prompts} & {p.images for p in read_prompts(task, "test")}
    answers = {kind: set() for kind in ("count", "color", "place")}  # type: ignore[var-annotated]
    for prompt in prompts:
        answers[prompt.metadata["ask"]].add(prompt.answer)
        cells = np.asarray(decoded(prompt.images[0])).reshape(3, 32, 3, 32, 3)
        seen = {}  # the color and the filled share of each cell's inner 24 pixels
        for row, column in np.ndindex(3, 3):
            pixels = cells[row, :, column].reshape(-1, 3)
            found = [n for n, rgb in COLORS.items() if (pixels == rgb).all(1).any()]
            if found:
                filled = (pixels == COLORS[found[0]]).all(1).sum() / 25**2
                kind = "square" if filled > 0.9 else "circle" if filled > 0.65 else "triangle"
                seen[row, column] = (kind, found[0])
        kinds = [kind for kind, _ in seen.values()]
        words = prompt.asked.removeprefix("<image>").rstrip("?\n").split()
        if words[0] == "How":
            assert prompt.answer == str(kinds.count(words[2].removesuffix("s")))
        elif words[0] == "Which":
            assert [c for kind, c in seen.values() if kind == words[-1]] == [prompt.answer]
        else:
            ((_, first),) = [place for place in seen if seen[place][0] == words[2]]
            ((_, second),) = [place for place in seen if seen[place][0] == words[-1]]
            assert prompt.answer == ("left" if first < second else "right")
        assert task.score(prompt, f" {prompt.answer} ") == 1.0
        assert task.score(prompt, "purple") == 0.0
    assert answers["color"] == {*COLORS}
    assert answers["place"] == {"left", "right"}
    assert len(answers["count"]) >= 3
    with pytest.raises(UserError, match=r"options.ask.* = .size"):
        get_task("shapes", ask=["size"])


@pytest.mark.parametrize("options", [{"ask": ["place"]}, {"ask": ["color"]}, {}])
def test_shapes_hold_out_their_test_prompts(options: dict[str, Any]) -> None:
    task = get_task("shapes", most=2, **options)
    prompts = [*read_prompts(task, "test"), *read_prompts(task, "train")]
    assert len(prompts) == 2200
    keys = {(prompt.asked, decoded(prompt.images[0]).tobytes()) for prompt in prompts}
    assert len(keys) == 2200


@pytest.mark.parametrize("split", ["train", "test"])
def test_shapes_that_options_do_not_allow_are_refused(split: str) -> None:
    # 6 questions, 6 pairs of columns, 9 of rows and 9 of colors
    task = get_task("shapes", most=2, ask=["place"], count=30_000)
    few = r"count = 30000: after 2[89]\d\d different prompts, no more of kind 'place' are found"
    with pytest.raises(UserError, match=few):
        read_prompts(task, split)


def test_large_shapes_are_drawn_when_they_are_needed() -> None:
    task = get_task("shapes", size=2048, count=10)
    tracemalloc.start()
    try:
        prompts = read_prompts(task, "train")
        assert tracemalloc.get_traced_memory()[1] < 2**20  # pixels of one image take 12 MiB
    finally:
        tracemalloc.stop()
    assert decoded(prompts[0].images[0]).size == (2048, 2048)


def test_images_of_rows_are_decoded_once_and_their_files_stay_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": "?", "answer": "5", "image": f"{n}.bmp"} for n in range(20)]
    for n in range(20):
        Pillow.new("RGB", (100, 100), (n, n, n)).save(tmp_path / f"{n}.bmp")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = []
    answer = LimitedProcess.answer
    monkeypatch.setattr(LimitedProcess, "answer", lambda *given: loaded.append(1) or answer(*given))
    task = get_task(str(tmp_path / "rows.jsonl"))
    prompts = [prompt for split in ("train", "test") for prompt in read_prompts(task, split)]
    assert (len(prompts), len(loaded)) == (20, 20)
    assert len(pickle.dumps(prompts)) < 20_000  # a file has 30,000 bytes
    (image,) = prompts[0].images
    again = pickle.loads(pickle.dumps(image))
    assert (again, again.data) == (image, image.data)
    for file in tmp_path.glob("*.bmp"):
        file.write_bytes(file_of())
    with pytest.raises(UserError, match=r"image: .*\d.bmp has changed since the run read it"):
        decoded(image)
    for file in tmp_path.glob("*.bmp"):
        file.unlink()
    with pytest.raises(UserError, match=r"image: .*\d.bmp: No such file"):
        decoded(image)
