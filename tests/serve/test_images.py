"""Images in requests: the answer is that of `RolloutEngine.generate`, and limits are named."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.models.test_images import model, picture
from tests.serve.conftest import TEMPLATE, Server, answering
from tests.serve.test_episodes import training_of

from jetrl.models.policy import Policy
from jetrl.rollout.engine import RolloutEngine
from jetrl.serve import images
from jetrl.serve.images import MOST_IMAGES
from jetrl.types import Image, Json, Prompt, SamplingParams

SAMPLING = {"max_tokens": 12, "temperature": 0.8, "seed": 5}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module", params=["idefics3", "qwen2_5_vl", "qwen3_vl"])
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    path = model(tmp_path_factory.mktemp("models") / "model", request.param)
    policy = Policy.from_pretrained(path, "int8")
    assert policy.tokenizer is not None
    policy.tokenizer.chat_template = TEMPLATE
    return policy


@pytest.fixture(scope="module")
def eyes(seeing: Policy) -> Iterator[Server]:
    with answering(seeing) as server:
        yield server


def url_of(image: Image) -> str:
    return "data:image/png;base64," + base64.b64encode(image.data).decode()


def part(url: object, **more: object) -> Json:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def text(words: str) -> Json:
    return {"type": "text", "text": words}


def of_user(*parts: Json) -> list[Json]:
    return [{"role": "user", "content": [*parts]}]


def asked(client: Any, messages: list[Json], **more: Any) -> Any:
    extra = {"return_token_ids": True}
    return client.chat.completions.create(
        model="tiny", messages=messages, extra_body=extra, **SAMPLING, **more
    )


def test_an_answer_is_what_generate_draws_whoever_else_asks(seeing: Policy, eyes: Server) -> None:
    first, second = picture(1), picture(2, 40, 9)
    shown = [text("Is it "), part(url_of(first)), text(" or "), part(url_of(second), detail="auto")]
    messages = [{"role": "system", "content": "Look."}, *of_user(*shown)]
    swapped = [messages[0], *of_user(shown[0], shown[3], shown[2], shown[1])]
    content = [shown[0], {"type": "image"}, shown[2], {"type": "image"}]
    prompts = [
        Prompt("p", messages=(messages[0], {"role": "user", "content": content}), images=seen)
        for seen in ((first, second), (second, first))
    ]
    expected = RolloutEngine(seeing).generate(prompts, SamplingParams(**SAMPLING))  # type: ignore[arg-type]
    others: list[list[Json]] = [[{"role": "user", "content": "no image"}], of_user(shown[1])]
    with ThreadPoolExecutor(6) as pool:
        told = [messages, *others, swapped, messages, swapped]
        answers = [*pool.map(lambda each: asked(eyes.openai, each), told)]
    drawn = [tuple(answer.choices[0].token_ids) for answer in answers]
    assert drawn[0] == drawn[4] == expected[0].token_ids
    assert drawn[3] == drawn[5] == expected[1].token_ids != expected[0].token_ids
    assert answers[0].choices[0].message.content == expected[0].text
    counted = eyes.json("/tokenize", {"messages": messages})
    assert counted["tokens"] == answers[0].prompt_token_ids
    assert answers[0].usage.prompt_tokens == counted["count"]
    streamed = [
        token
        for chunk in asked(eyes.openai, messages, stream=True)
        for choice in chunk.choices
        for token in getattr(choice, "token_ids", None) or ()
    ]
    assert tuple(streamed) == expected[0].token_ids


PNG = url_of(picture(1))
REFUSED: dict[str, tuple[object, str]] = {
    "http": (part("http://127.0.0.1/a.png"), "only data:image/...;base64, is read, and nothing is"),
    "https": (part("https://example.com/a.png"), ".1.image_url.url = 'https://example.com/a.png'"),
    "file": (part("file:/etc/passwd"), "nothing is fetched; send the image itself"),
    "path": (part("/etc/passwd"), "nothing is fetched"),
    "number": (part(3), "image_url.url = 3: only data:"),
    "text": (part("data:text/plain;base64,aGk="), "only data:image/"),
    "escaped": (part("data:image/svg+xml,%3Csvg%3E"), "only data:image/"),
    "base64": (part("data:image/png;base64,a-_="), "image_url.url: not base64: "),
    "unicode": (part("data:image/png;base64,\u00e4"), "image_url.url: not base64: "),
    "damaged": (part(PNG[:-400]), "messages.1.content.1: a damaged PNG file"),
    "svg": (part("data:image/svg+xml;base64,PHN2Zz4="), "not an image file (PNG, JPEG"),
    "detail": (part(PNG, detail="low"), "image_url.detail: only 'auto' is supported, not 'low'"),
    "field": (part(PNG, size=3), "messages.1.content.1 = {'image_url': "),
    "beside": ({**part(PNG), "uuid": "a"}, "give {'type': 'image_url', 'image_url'"),
    "flat": ({"type": "image_url", "image_url": PNG}, "give {'type': 'image_url', 'image_url'"),
    "image": ({"type": "image"}, "messages.1.content.1: a part of type 'image' has no image"),
    "mark": (text("<image>"), "2 places of images (<image>) for 1 images"),
    "audio": ({"type": "input_audio", "input_audio": {}}, "a part of type 'input_audio'"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("seeing", ["qwen2_5_vl"], indirect=True)
def test_what_is_no_image_is_named(case: str, eyes: Server) -> None:
    refused, words = REFUSED[case]
    messages = [{"role": "system", "content": "Look."}, *of_user(part(PNG), refused)]  # type: ignore[arg-type]
    reply = eyes.post(CHAT, {"messages": messages})
    assert reply.status_code == 400, reply.text
    assert words in reply.json()["error"]["message"]


@pytest.mark.parametrize("seeing", ["qwen2_5_vl"], indirect=True)
def test_the_number_and_pixels_of_images_are_bounded(
    eyes: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*parts: Json) -> str:
        reply = eyes.post(CHAT, {"messages": of_user(*parts)})
        assert reply.status_code == 400, reply.text
        return str(reply.json()["error"]["message"])

    small = part(url_of(picture(1, 16, 16)))
    assert f".content.{MOST_IMAGES}: a request has at most" in said(*[small] * (MOST_IMAGES + 1))
    monkeypatch.setattr(images, "MOST_PIXELS", 600)
    assert "content.2: 16 x 16 pixels; at most 88 are read" in said(small, small, small)
    assert "30 x 30 pixels; at most 600 are read" in said(part(url_of(picture(2, 30, 30))))


@pytest.mark.parametrize("seeing", ["qwen2_5_vl"], indirect=True)
def test_other_paths_read_text_only(seeing: Policy, eyes: Server) -> None:
    place = seeing.config.vision.image_token_id  # type: ignore[union-attr]
    for path, body, words in (
        ("/v1/completions", {"prompt": "<image>?"}, "1 places of images (<image>) for 0 images"),
        ("/v1/completions", {"prompt": [5, place]}, f"token {place} is the place of an image"),
        ("/v1/completions", {"prompt": of_user(part(PNG))}, "prompt: give a text, a list of"),
        ("/inference/v1/generate", {"token_ids": [5, place]}, "token ids come without images"),
        ("/inference/v1/generate", {"token_ids": [5], "features": {"a": 1}}, "features: only {}"),
    ):
        reply = eyes.post(path, body)
        assert reply.status_code == 400, reply.text
        assert words in reply.json()["error"]["message"]


def test_a_model_of_text_names_the_part(server: Server) -> None:
    for path in (CHAT, "/tokenize"):
        reply = server.post(path, {"messages": of_user(text("Is it"), part("https://a/b.png"))})
        assert reply.status_code == 400
        words = "messages.0.content.1: this model reads text only, and this part is an image"
        assert reply.json()["error"]["message"] == words


@pytest.mark.parametrize("seeing", ["qwen2_5_vl"], indirect=True)
def test_an_episode_of_a_training_is_text_only(seeing: Policy) -> None:
    with training_of(seeing) as training:
        harness = training.open("one")
        with pytest.raises(Exception, match="episodes of a training are text only"):
            training.window(lambda: asked(harness, of_user(part(PNG))))
        (answer,) = training.window(lambda: asked(training.server.openai, of_user(part(PNG))))
        assert answer.choices[0].token_ids
