"""Greedy accuracy on GSM8K's test questions of an export, as jetrl, transformers and vLLM read it.

    python -m benchmarks.peer_accuracy runs/mine --plan int8
    python -m benchmarks.peer_accuracy runs/mine --plan int8 --reader vllm

The model is a directory or a run. `own` answers with its weights under --plan; the others read what
`jetrl export` writes in BF16: jetrl under `bf16`, transformers, and vLLM, which shares no
environment with sgl-deep-gemm. All get the same token ids and the same checker. Answers are kept in
--work, so a later command adds readers; the table has all that are there.

    different      questions that this reader and `own` judge differently
    error          standard error of the difference of both accuracies, over questions
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import command_typed, print_table, write_results

READERS = ("own", "jetrl", "transformers", "vllm")
QUESTIONS = "questions.json"
ASKED = ("model", "plan", "prompts", "max_tokens")  # alike for all answers in a folder


def write_questions(args: argparse.Namespace) -> None:
    """Write the export and the questions' token ids into --work, unless they are there."""
    from jetrl.cli.opening import open_model
    from jetrl.session.sampling import encode_prompts
    from jetrl.tasks import get_task

    if (args.work / QUESTIONS).is_file():
        return
    policy = open_model(args.model, args.plan, args.device)
    policy.save_pretrained(args.work / "model", dtype="bfloat16", overwrite=True)
    encoded = encode_prompts(policy, get_task("gsm8k"), "test", args.prompts)
    questions = [list(each.inputs.token_ids) for each in encoded]
    written = {**{key: getattr(args, key) for key in ASKED}, "questions": questions}
    (args.work / QUESTIONS).write_text(json.dumps(written), encoding="utf-8")


def ours(args: argparse.Namespace, questions: Sequence[list[int]], export: bool) -> list[str]:
    """Return jetrl's answers: of the model under --plan, or of its export under `bf16`."""
    from jetrl.cli.opening import open_policy
    from jetrl.rollout.engine import RolloutEngine
    from jetrl.types import PromptInputs, SamplingParams

    source, plan = (str(args.work / "model"), "bf16") if export else (args.model, args.plan)
    engine = RolloutEngine(open_policy(source, plan, args.device))
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    answers = engine.generate([PromptInputs(tuple(question)) for question in questions], params)
    return [answer.text for answer in answers]


def of_transformers(args: argparse.Namespace, questions: Sequence[list[int]]) -> list[str]:
    """Return the answers of transformers in BF16, --batch questions at a time."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.work / "model", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.work / "model", dtype=torch.bfloat16)
    model = model.to(args.device).eval()
    # `repetition_penalty` may stand in generation_config.json, and acts on greedy answers too.
    greedy = {"max_new_tokens": args.max_tokens, "do_sample": False, "repetition_penalty": 1.0}
    texts: dict[int, str] = {}
    order = sorted(range(len(questions)), key=lambda i: len(questions[i]))
    for start in range(0, len(order), args.batch):
        chosen = order[start : start + args.batch]
        inputs = tokenizer.pad({"input_ids": [questions[i] for i in chosen]}, return_tensors="pt")
        inputs = inputs.to(args.device)
        with torch.no_grad():
            made = model.generate(**inputs, **greedy)
        made = made[:, inputs["input_ids"].shape[1] :]
        decoded = tokenizer.batch_decode(made, skip_special_tokens=True)
        texts |= dict(zip(chosen, decoded, strict=True))
    return [texts[i] for i in range(len(questions))]


def of_vllm(args: argparse.Namespace, questions: Sequence[list[int]]) -> list[str]:
    """Return vLLM's answers in BF16."""
    from benchmarks.vllm_rollout import set_environment

    set_environment()
    from vllm import LLM, SamplingParams

    longest = max(map(len, questions)) + args.max_tokens
    llm = LLM(
        model=str(args.work / "model"),
        dtype="bfloat16",
        max_model_len=longest,
        generation_config="vllm",  # not the penalties of generation_config.json
    )
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    requests = [{"prompt_token_ids": list(question)} for question in questions]
    return [output.outputs[0].text for output in llm.generate(requests, params)]


def judged(answers: dict[str, list[str]]) -> list[dict[str, Any]]:
    """Return a row for each reader, from its answers to the same first questions of the split."""
    from jetrl.tasks import Scorer, get_task, read_prompts

    prompts = read_prompts(get_task("gsm8k"), "test")
    right: dict[str, list[bool]] = {}
    with Scorer("gsm8k") as scorer:
        for reader, texts in answers.items():
            scores = scorer.score([*zip(prompts[: len(texts)], texts, strict=True)])
            right[reader] = [scored.score.reward == 1.0 for scored in scores]
    return [row_of(reader, own, right["own"]) for reader, own in right.items()]


def row_of(reader: str, right: Sequence[bool], own: Sequence[bool]) -> dict[str, Any]:
    """Return a reader's accuracy next to that of `own`, question by question."""
    differences = [float(one) - float(other) for one, other in zip(right, own, strict=True)]
    count = len(differences)
    mean = sum(differences) / count
    spread = sum((each - mean) ** 2 for each in differences) / max(count - 1, 1)
    return {
        "reader": reader,
        "questions": count,
        "accuracy": round(sum(right) / count, 4),
        "minus_own": round(mean, 4),
        "error": round(math.sqrt(spread / count), 4),
        "different": sum(each != 0 for each in differences),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a model directory or a run")
    parser.add_argument("--plan", default="int8", help="of `own` (default: int8)")
    parser.add_argument(
        "--reader", nargs="+", choices=READERS, default=["own", "jetrl", "transformers"]
    )
    parser.add_argument("--prompts", type=int, default=0, help="the first N questions (0: all)")
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--batch", type=int, default=128, help="of transformers (default 128)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--work", type=Path, default=Path("build/bench/peer_accuracy"))
    parser.add_argument("--out", type=Path, default=Path("build/bench/peer_accuracy.json"))
    args = parser.parse_args(argv)
    args.work.mkdir(parents=True, exist_ok=True)
    write_questions(args)
    written = json.loads((args.work / QUESTIONS).read_text(encoding="utf-8"))
    for key in ASKED:
        if written[key] != getattr(args, key):
            parser.error(f"--work {args.work} has answers of {key} {written[key]}: name another")
    questions = written["questions"]
    for reader in args.reader:
        if reader == "transformers":
            answers = of_transformers(args, questions)
        elif reader == "vllm":
            answers = of_vllm(args, questions)
        else:
            answers = ours(args, questions, export=reader == "jetrl")
        (args.work / f"{reader}.json").write_text(json.dumps(answers), encoding="utf-8")
    found = {
        reader: json.loads((args.work / f"{reader}.json").read_text(encoding="utf-8"))
        for reader in READERS
        if (args.work / f"{reader}.json").is_file()
    }
    if "own" not in found:
        parser.error("--reader own has not answered yet: the others are compared with it")
    rows = judged(found)
    print_table(rows)
    command = command_typed("python -m benchmarks.peer_accuracy", argv)
    write_results(args.out, "peer_accuracy", command, rows, model=args.model, plan=args.plan)


if __name__ == "__main__":
    main()
