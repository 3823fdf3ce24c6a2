"""Generate completions of a prompt, or of each line of standard input.

For example:

    jetrl sample runs/demo "12+7="
    jetrl sample models/qwen3-8b --chat "Why is the sky blue?" --max-tokens 400
    jetrl sample runs/demo --n 4 --json < prompts.txt
    jetrl sample models/smolvlm --chat --image cat.png "What is this?"
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jetrl.cli import arguments
from jetrl.errors import UserError
from jetrl.types import Json

if TYPE_CHECKING:
    from jetrl.types import Completion, Image, Prompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    arguments.add_model_arguments(parser)
    add(
        "prompt",
        nargs="*",
        metavar="PROMPT",
        help="text to complete; several words form one prompt (default: one prompt per line of "
        "stdin)",
    )
    add("--n", type=int, default=1, help="completions per prompt")
    arguments.add_sampling_arguments(parser, max_tokens=256, temperature=1.0)
    add("--stop", action="append", default=[], help="stop string (repeatable)")
    add("--chat", action="store_true", help="use the model's chat template")
    add(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="image that every prompt has, at its place (<image>) or else in front of the text "
        "(repeatable)",
    )
    add("--system", metavar="TEXT", help="system prompt (with --chat)")
    add("--json", action="store_true", help="print one JSON object per completion")


def run(args: argparse.Namespace) -> int:
    if args.system is not None and not args.chat:
        raise UserError("--system needs --chat: plain text has no system prompt")
    if args.template_arg and not args.chat:
        raise UserError("--template-arg needs --chat: plain text has no template")
    template_args = arguments.key_values(args.template_arg, "--template-arg")
    names = ("n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
    values = {name: getattr(args, name) for name in names}
    params = arguments.sampling_params(stop=tuple(args.stop), **values)
    prompts = list(_read_prompts(args.prompt, args.chat, args.image))

    from jetrl.cli.opening import open_policy
    from jetrl.models.chat_template import set_template_args
    from jetrl.rollout.engine import RolloutEngine

    policy = open_policy(args.model, args.plan, args.device)
    set_template_args(policy.tokenizer, template_args, "--template-arg")
    completions = RolloutEngine(policy).generate(prompts, params, system_prompt=args.system)
    for index, completion in enumerate(completions):
        prompt = prompts[index // params.n]
        if args.json:
            arguments.print_json(_as_object(prompt, completion), indent=None)
        else:
            print(_as_text(prompt, completion))
    return 0


def _read_prompts(words: Sequence[str], chat: bool, files: Sequence[str]) -> Iterator[Prompt]:
    """Yield prompts from the arguments, or from the lines of standard input with text."""
    from jetrl.tasks.base import question_content
    from jetrl.tasks.shapes import with_places
    from jetrl.types import Prompt

    images = tuple(map(_read_image, files))
    texts = [" ".join(words)] if words else []
    if not texts:
        if sys.stdin.isatty():
            print("one prompt per line; end with Ctrl-D", file=sys.stderr)
        texts = [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not texts:
        raise UserError("no prompt: give one as an argument, or lines on standard input")
    for number, text in enumerate(texts):
        content = question_content("chat" if chat else "text", text)
        if images:
            content = with_places(content, images, f"prompt {number}")
        yield Prompt(id=str(number), images=images, **content)


def _read_image(file: str) -> Image:
    from jetrl.files import read_bytes
    from jetrl.types.images import MOST_BYTES, checked_image

    try:
        data = read_bytes(file, MOST_BYTES)
    except FileNotFoundError:
        raise UserError(f"--image {file}: no such file") from None
    return checked_image(data, f"--image {file}")


def _as_text(prompt: Prompt, completion: Completion) -> str:
    total = math.fsum(completion.logprobs)
    facts = f"{len(completion.token_ids)} tokens, {completion.finish_reason}, log-prob {total:.3f}"
    from jetrl.runs.format import visible

    text = f"{prompt.asked}{completion.text}"
    if sys.stdout.isatty():  # a terminal gets no control characters
        text = visible(text, newlines=True)
    return f"{text}\n  [{facts}]"


def _as_object(prompt: Prompt, completion: Completion) -> Json:
    return {
        "prompt": prompt.asked,
        "completion": completion.text,
        "finish_reason": completion.finish_reason,
        "logprob": math.fsum(completion.logprobs),
        "token_ids": completion.token_ids,
        "logprobs": completion.logprobs,
    }
