"""The fields of requests: those taken, those taken with only one value, and their errors.

A field that would change the answer and that jetrl does not have is an error that names it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jetrl.errors import UserError, nearest
from jetrl.files import shown_value
from jetrl.serve.images import with_images
from jetrl.serve.source import Request, TokenSource
from jetrl.types import Json, Prompt, SamplingParams

MOST_PROMPTS, MOST_STOPS = 256, 64

# Fields with values that ask for nothing. Other values are refused.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_tokens"), (0,)),
    **dict.fromkeys(("top_logprobs", "priority", "prompt_logprobs"), (0,)),
    **dict.fromkeys(("repetition_penalty", "length_penalty", "best_of"), (1,)),
    **dict.fromkeys(("echo", "store", "use_beam_search", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("logit_bias", "features"), ({},)),
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "service_tier": ("auto", "default"),
}
# Labels, and wishes for caches and experts that jetrl does not have: no value changes the answer.
LABELS = frozenset(
    {"user", "metadata", "cache_salt", "prompt_cache_key", "safety_identifier", "request_id"}
    | {"routed_experts_prompt_start"}
)
# Of answers in tokens, which have no text.
_OF_TEXT = frozenset({"skip_special_tokens", "spaces_between_special_tokens", "detokenize"})


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Sampling(_Fields):
    n: int = Field(1, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = Field(0, ge=-1)
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False


class _Answer(_Sampling):
    model: str | None = None
    stream: bool = False
    stream_options: dict[str, bool] = {}
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False


class _Conversation(_Fields):
    messages: list[Json] = Field(min_length=1)
    tools: list[Json] = []
    tool_choice: Literal["auto", "none"] = "auto"
    chat_template_kwargs: Json = {}

    def prompt(self, source: TokenSource, session: str) -> Prompt:
        """Return the messages as a prompt; raises UserError for images that are not read."""
        messages, images = with_images(self.messages, source.blind(session))
        return Prompt(
            id="messages",
            messages=tuple(messages),
            tools=() if self.tool_choice == "none" else tuple(self.tools),
            template_args=self.chat_template_kwargs,
            images=images,
        )


class ChatFields(_Answer, _Conversation):
    """The body of /v1/chat/completions."""

    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False


class CompletionFields(_Answer):
    """The body of /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=1)


class _TokenSampling(_Sampling):
    logprobs: int | None = Field(None, ge=0, le=1)


class GenerateFields(_Fields):
    """The body of /inference/v1/generate."""

    token_ids: list[int] = Field(min_length=1)
    sampling_params: _TokenSampling = _TokenSampling()
    model: str | None = None
    stream: Literal[False] = False
    return_token_ids: bool = True


class TextFields(_Fields):
    """The body of /tokenize with a text."""

    prompt: str
    model: str | None = None


class MessagesFields(_Conversation):
    """The body of /tokenize with messages."""

    model: str | None = None


@dataclass(frozen=True)
class Wanted:
    """A request, and the form of its answer.

    Attributes:
        api: "chat", "completion" or "generate".
        logprobs: The answer has the log-prob of each token.
        token_ids: The answer has the token ids of prompt and completion.
        tokens_as_ids: Tokens are written as `token_id:ID`.
        tools: Tool calls are taken out of the text.
        usage: A stream ends with the counts of tokens.
    """

    api: str
    request: Request
    stream: bool = False
    usage: bool = False
    logprobs: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False
    tools: bool = False


class UnknownModel(UserError):  # noqa: N818  (one of the answers of the API)
    """The request names another model than the one that is served."""


FieldsType = TypeVar("FieldsType", bound=_Fields)


def fields_of(kind: type[FieldsType], body: object, name: str) -> FieldsType:
    """Return the checked fields of a body; `name` is that of the model that is served.

    Raises UnknownModel, or a UserError that names the field.
    """
    if not isinstance(body, Mapping):
        raise UserError("the body must be a JSON object")
    given = _without_neutral(body)
    if kind is GenerateFields and isinstance(sampling := given.get("sampling_params"), Mapping):
        given["sampling_params"] = _without_neutral(sampling, _OF_TEXT, "sampling_params.")
    try:
        fields = kind.model_validate(given)
    except ValidationError as error:
        raise UserError(_in_words(kind, error)) from None
    model = getattr(fields, "model", None)
    if model is not None and model != name:
        raise UnknownModel(f"model {model!r:.100} is not served here; there is: {name}")
    return fields


def _without_neutral(
    body: Mapping[str, Any], ignored: frozenset[str] = frozenset(), where: str = ""
) -> Json:
    """Return the fields that have to be read; raises UserError for one that is not supported."""
    given = {}
    for key, value in body.items():
        if value is None or key in LABELS or key in ignored:
            continue
        if key not in NEUTRAL:
            given[key] = value
            continue
        allowed = NEUTRAL[key]
        if not any(value == one and type(value) in _like(one) for one in allowed):
            only = " or ".join(json.dumps(one) for one in allowed)
            raise UserError(
                f"{where}{key}: only {only} is supported, not {shown_value(value)}; leave it out"
            )
    return given


def _like(value: object) -> tuple[type, ...]:
    """Return the types whose values may stand for a value: 0.0 for 0, and not False."""
    return (int, float) if type(value) is int else (type(value),)


def _in_words(kind: type[BaseModel], error: ValidationError) -> str:
    """Return the message of the first error, with the path of its field."""
    first = error.errors(include_url=False)[0]
    place = [str(part) for part in first["loc"]]
    path = ".".join(place)
    if first["type"] == "extra_forbidden":
        known = _TokenSampling if len(place) > 1 else kind
        return f"{path}: no such field{nearest(place[-1], known.model_fields)}"
    if first["type"] == "missing":
        return f"{path}: this field is required"
    if not place:  # a key that is no text
        return f"the body: {first['msg']}"
    if "stop" in place:
        above = "".join(f"{part}." for part in place[: place.index("stop")])
        return f"{above}stop: give a text, or a list of at most {MOST_STOPS} texts"
    if place[0] == "prompt":
        return "prompt: give a text, a list of token ids, or a list of either"
    return f"{path} = {shown_value(first['input'])}: {first['msg']}"


def chat(fields: ChatFields, source: TokenSource, session: str) -> Wanted:
    """Return the request of a chat."""
    limit = fields.max_completion_tokens or fields.max_tokens
    if fields.max_tokens not in (None, limit):
        raise UserError("max_tokens and max_completion_tokens differ: send one of them")
    prompts = source.encode([fields.prompt(source, session)], session)
    return Wanted(
        api="chat",
        request=Request(prompts, _params(fields, limit, source, session), session),
        logprobs=fields.logprobs,
        tools=bool(fields.tools) and fields.tool_choice == "auto",
        **_form(fields),
    )


def completion(fields: CompletionFields, source: TokenSource, session: str) -> Wanted:
    """Return the request of completions of a prompt, or of each of several."""
    given = fields.prompt
    one = isinstance(given, str) or isinstance(next(iter(given), None), int)
    several: Sequence[Any] = [given] if one else given
    if not 1 <= len(several) <= MOST_PROMPTS:
        raise UserError(f"prompt: from 1 to {MOST_PROMPTS} prompts, not {len(several)}")
    prompts = source.encode([_as_prompt(prompt) for prompt in several], session)
    params = _params(fields, fields.max_tokens, source, session, num_prompts=len(several))
    return Wanted(
        api="completion",
        request=Request(prompts, params, session),
        logprobs=fields.logprobs is not None,
        **_form(fields),
    )


def generate(fields: GenerateFields, source: TokenSource, session: str) -> Wanted:
    """Return the request of completions of token ids."""
    sampling = fields.sampling_params
    params = _params(sampling, sampling.max_tokens, source, session)
    return Wanted(
        api="generate",
        request=Request(source.encode([fields.token_ids], session), params, session),
        logprobs=sampling.logprobs is not None,
        token_ids=True,
        tokens_as_ids=True,
    )


def token_ids_of(
    fields: TextFields | MessagesFields, source: TokenSource, session: str
) -> list[int]:
    """Return the token ids of a text or of messages."""
    if isinstance(fields, TextFields):
        prompt = _as_prompt(fields.prompt)
    else:
        prompt = fields.prompt(source, session)
    return list(source.encode([prompt], session)[0].token_ids)


def _as_prompt(prompt: str | list[int]) -> Prompt | list[int]:
    return Prompt(id="prompt", text=prompt) if isinstance(prompt, str) else prompt


def _form(fields: _Answer) -> dict[str, bool]:
    """Return what a body says about the form of its answer."""
    options = dict(fields.stream_options)
    usage = options.pop("include_usage", False)
    if options:
        raise UserError(
            f"stream_options.{next(iter(options))}: no such field; there is: include_usage"
        )
    return {
        "stream": fields.stream,
        "usage": usage,
        "token_ids": fields.return_token_ids,
        "tokens_as_ids": fields.return_tokens_as_token_ids,
    }


def _params(
    fields: _Sampling, limit: int | None, source: TokenSource, session: str, num_prompts: int = 1
) -> SamplingParams:
    """Return the parameters of sampling; without seed and session, the seed is a random one."""
    if num_prompts * fields.n > source.max_choices:
        each = f" for each of {num_prompts} prompts" if num_prompts > 1 else ""
        raise UserError(f"n = {fields.n}{each}: this server draws {source.max_choices} at most")
    required = source.required(session)
    seed = fields.seed
    if seed is None:
        seed = secrets.randbits(53) if not session else required.seed if required else 0
    own = _drawn(fields, required)
    stop = required.stop if required and "stop" not in fields.model_fields_set else fields.stop
    try:
        return replace(
            required or SamplingParams(),
            n=fields.n,
            max_tokens=min(limit or source.max_model_len, source.max_model_len),
            stop_token_ids=tuple(fields.stop_token_ids),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            seed=seed,
            ignore_eos=fields.ignore_eos,
            **own,
        )
    except ValueError as error:
        raise UserError(str(error).removeprefix("SamplingParams: ")) from None


def _drawn(fields: _Sampling, required: SamplingParams | None) -> Json:
    """Return the fields that change the distribution; raise UserError if another is required."""
    own = {name: getattr(fields, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    own["top_k"] = max(0, own["top_k"])
    if required is None:
        return own
    for name in own.keys() & fields.model_fields_set:
        if own[name] != (asked := getattr(required, name)):
            raise UserError(
                f"{name} = {own[name]}: this policy is in training and draws with {asked} "
                f"(rollout.{name}, or eval.{name}); leave it out"
            )
    return {name: getattr(required, name) for name in own}
