"""Answer OpenAI's API over HTTP from a model, for agents and other clients.

For example:

    jetrl serve runs/demo
    JETRL_API_KEY=secret jetrl serve models/qwen3-8b --host 0.0.0.0 --name qwen3-8b
    curl 127.0.0.1:8000/v1/completions --json '{"prompt": "12+7=", "max_tokens": 4}'
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from jetrl.cli import arguments
from jetrl.distributed.console import tell
from jetrl.errors import Terminated, UserError

if TYPE_CHECKING:
    from jetrl.rollout.engine import RolloutEngine

KEY_VARIABLE = "JETRL_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    arguments.add_model_arguments(parser)
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all of this machine")
    add("--port", type=int, default=8000, help="port to listen on; 0: any that is free")
    add("--name", help="name of the model in requests (default: MODEL)")
    add(
        "--api-key",
        metavar="KEY",
        help=f"key that clients have to send (default: ${KEY_VARIABLE}, which `ps` does not show)",
    )
    sizes = parser.add_argument_group("sizes").add_argument
    sizes("--max-batch-size", type=int, default=64, help="maximum sequences per forward")
    sizes(
        "--max-model-len",
        type=int,
        help="maximum tokens of prompt and completion (default: the model's context)",
    )
    sizes("--num-pages", type=int, help="pages of the KV cache (default: what memory has room for)")
    sizes(
        "--max-queue",
        type=int,
        default=1024,
        help="completions that run or wait at once; more are answered with status 429",
    )
    sizes("--max-body-mib", type=int, default=8, help="maximum size of a request, in MiB")
    sizes(
        "--stop-s",
        type=int,
        default=30,
        help="seconds that running requests have to end after SIGTERM or Ctrl-C",
    )
    arguments.add_template_argument(parser)


def run(args: argparse.Namespace) -> int:
    for option in ("max_queue", "max_body_mib", "stop_s"):
        if getattr(args, option) < 1:
            raise UserError(f"--{option.replace('_', '-')} must be at least 1")
    template_args = arguments.key_values(args.template_arg, "--template-arg")
    key = args.api_key if args.api_key is not None else os.environ.get(KEY_VARIABLE, "")
    try:
        import uvicorn

        from jetrl.serve.app import Limits, make_app
        from jetrl.serve.replies import Served
        from jetrl.serve.server import LOOPBACK, listen
        from jetrl.serve.source import EngineSource
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] == "jetrl":
            raise
        raise UserError(f"jetrl serve needs {error.name}: pip install 'jetrl[serve]'") from None
    from jetrl import __version__
    from jetrl.cli.opening import find_model, open_policy
    from jetrl.models.chat_template import set_template_args
    from jetrl.rollout.engine import RolloutEngine

    signal.signal(signal.SIGTERM, _terminate)
    # Before the weights, which take minutes.
    listening = listen(args.host, args.port, f"--host {args.host} --port {args.port}")
    policy = open_policy(args.model, args.plan, args.device)
    set_template_args(policy.tokenizer, template_args, "--template-arg")
    engine = RolloutEngine(
        policy,
        max_batch_size=args.max_batch_size,
        num_pages=args.num_pages,
        max_model_len=args.max_model_len,
    )
    with arguments.advice_in_options():
        pages = engine.reserve()
    version = _version(find_model(Path(args.model)).path)
    source = EngineSource(engine, policy, max_choices=args.max_queue, version=version)
    source.start()
    served = Served(
        name=args.name or args.model,
        tokenizer=policy.tokenizer,
        fingerprint=f"jetrl-{__version__}-{policy.plan.name}",
    )
    local = args.host in LOOPBACK
    limits = Limits(key, args.max_body_mib * 2**20, LOOPBACK[:2] if local else ())
    config = uvicorn.Config(
        make_app(source, served, limits),
        log_config=None,
        access_log=False,
        limit_concurrency=args.max_queue + 64,
        timeout_graceful_shutdown=args.stop_s,
    )
    _announce(engine, served.name, listening, pages)
    if not (local or key):
        tell(f"warning: whoever reaches {args.host} can use this model: set ${KEY_VARIABLE}")
    try:
        uvicorn.Server(config).run(sockets=[listening])
    finally:
        source.close()
    return 0


def _terminate(number: int, frame: object) -> NoReturn:
    """End the command; while the server runs, uvicorn lets requests end before."""
    raise Terminated


def _version(path: Path) -> int:
    """Return the step of a checkpoint's directory, 0 of a model's."""
    found = re.fullmatch(r"step_(\d+)", path.name)
    return int(found[1]) if found else 0


def _announce(engine: RolloutEngine, name: str, listening: socket.socket, pages: int) -> None:
    host, port = listening.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    sizes = engine.sizes.now
    print(
        f"{name} at http://{host}:{port}/v1 ({engine.policy.plan.name} on {engine.policy.device}; "
        f"{sizes.max_batch_size} sequences at once, {engine.max_model_len:,} tokens each, "
        f"{pages:,} pages of {engine.page_size} tokens)",
        flush=True,
    )
