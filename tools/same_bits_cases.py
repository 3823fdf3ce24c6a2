"""The runs that same_bits.py compares: short, on tiny models, through the command line alone.

Every case says which commands make its results. Their words may use the recipes and examples of the
tree under test (`recipes/...`, `examples/...`), the files that a case brings along, and what an
earlier command of the case wrote. All paths are relative, so that the results hold none of the
machine's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Command:
    """A call of `jetrl`.

    Attributes:
        words: The words after `jetrl`.
        output: The file that standard output goes to and that is compared; empty: not compared.
        killed_at: The path (a glob pattern) whose appearance gets the process killed with SIGKILL;
            empty: the command runs to its end.
    """

    words: tuple[str, ...]
    output: str = ""
    killed_at: str = ""


@dataclass(frozen=True)
class Case:
    """A list of commands whose results must not change.

    Attributes:
        name: The name for `--case`.
        about: What the case covers, in a few words.
        commands: The commands that both trees run.
        prepared_by: The commands that BASE alone runs first; both trees go on from their files.
        files: The text of each file that the commands read, by path.
        measures: Names of metrics of which each must be present and not 0 in some metrics.jsonl:
            else the case would not exercise what it is for.
    """

    name: str
    about: str
    commands: tuple[Command, ...]
    prepared_by: tuple[Command, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    measures: tuple[str, ...] = ()


def jetrl(*words: str, output: str = "", killed_at: str = "") -> Command:
    """Return a command that reads the words of its arguments, split at blanks."""
    split = tuple(part for word in words for part in word.split())
    return Command(split, output, killed_at)


COMMON = "run.dir=runs report.enabled=false checkpoint.keep_last=9"

# The same in both trees, though the demo changes.
MODEL = """
    model.config.num_attention_heads=2 model.config.num_key_value_heads=2
    model.config.initializer_range=0.02 sft.warmup_steps=0
"""

# A sum of two digits below 5, worked answers that are right half of the time: rewards vary at once.
SUPERVISED_SUMS = f"""
    {COMMON} {MODEL} task.options.max_operand=4 task.options.digits=1 task.options.mistakes=0.5
    model.config.num_hidden_layers=1 model.config.max_position_embeddings=64
    sft.until=none sft.examples_per_step=16 sft.lr=3e-3 rollout.max_tokens=6 eval.prompts=8
    train.tokens_per_micro_batch=48
"""
SUMS = f"""
    {SUPERVISED_SUMS} sft.steps=60 rollout.prompts_per_step=6 rollout.samples_per_prompt=6
    eval.every=0 train.lr=1e-3 train.warmup_steps=0 train.schedule=constant
    train.updates_per_step=1 checkpoint.every=0 loop.steps=3
"""

# The task of `TASK_OF_A_USER`, whose rewards vary without any warm-up.
LENGTHS = "task.name=lengths.py:Lengths task.options={}"

DEMO = f"""
    train recipes/demo.toml {COMMON} {MODEL} run.name=demo task.options.max_operand=9
    task.options.mistakes=0.55 sft.lr=1e-3
    sft.steps=60 sft.until=2.0 sft.check_every=30 sft.examples_per_step=32
    rollout.prompts_per_step=12 eval.every=2 eval.prompts=12 checkpoint.every=2
    checkpoint.keep_best=1 loop.steps=5
"""

PPO = f"""
    train recipes/demo.toml {SUMS} run.name=ppo algorithm.name=ppo algorithm.aggregation=none
    algorithm.kl=0.01 critic.path=policy critic.lr=1e-3 train.updates_per_step=2 checkpoint.every=1
"""

PARTIAL = f"""
    train recipes/demo.toml {SUMS} {LENGTHS} run.name=partial sft.steps=0 rollout.prompts_per_step=3
    rollout.samples_per_prompt=4 rollout.max_tokens=10 rollout.max_batch_size=9
    rollout.oversample=1.0 checkpoint.every=2 loop.steps=5
"""

SFT = f"""
    sft recipes/demo.toml {SUPERVISED_SUMS} run.name=warm sft.steps=40 sft.schedule=cosine
    sft.warmup_steps=5 sft.until=2.0 sft.check_every=10 checkpoint.every=10 --out models/warm
"""

REWARD_MODEL = f"""
    sft recipes/demo.toml {SUPERVISED_SUMS} run.name=judge sft.steps=40 sft.check_every=20
    sft.until=1.1 checkpoint.every=10 --task reward --out models/judge
"""

TURNS = f"""
    train examples/calculator.toml {COMMON} run.name=turns task.options.limit=10
    rollout.page_size=16 train.tokens_per_micro_batch=256
    model.config.num_hidden_layers=1 sft.steps=50 sft.until=none sft.examples_per_step=16
    sft.lr=1e-2 rollout.prompts_per_step=6 rollout.samples_per_prompt=6 rollout.max_tokens=24
    eval.every=2 eval.prompts=4 train.schedule=constant checkpoint.every=1 loop.steps=3
"""

TASK_OF_A_USER = '''
from jetrl.tasks import Task
from jetrl.types import Prompt


class Lengths(Task):
    """Sums whose reward is 1 for an answer of an odd number of characters."""

    alphabet = "0123456789+-="

    def prompts(self, split):
        return [Prompt(id=str(i), text=f"{i}+{i}=", answer=str(2 * i)) for i in range(12)]

    def score(self, prompt, completion):
        return float(len(completion) % 2)
'''

MIX = (
    'task=mix task.options={tasks=[{name="lengths.py:Lengths",label="lengths",weight=3},'
    '{name="arithmetic"}]}'
)


LOSS_OF_A_USER = """
def push(tokens, strength):
    return -strength * tokens.advantages * tokens.trainer_logprobs
"""

COMPACT = f"""
    train recipes/demo.toml {SUMS} run.name=compact model.config.num_hidden_layers=2
    train.optimizer_states=compact train.activation_checkpointing=true train.weight_decay=0.1
    precision.grad_output=e5m2 precision.scales=pow2 precision.last_layers_bf16=1
    precision.lm_head=fp8 checkpoint.every=1 checkpoint.background=false
"""

PARITY = "--max-tokens 24 --json --device DEVICE"

# The rows of a data set: chat messages, and answers that a pattern finds.
ROWS = "".join(
    json.dumps({"ask": f"What is {a} plus {b}?", "right": f"{a + b}", "worked": f"It is {a + b}."})
    + "\n"
    for a in range(8)
    for b in range(5)
)


def trained(name: str, *words: str) -> Command:
    """Return one short run of the algorithms' cases, which begins with the model of `SFT`."""
    return jetrl(
        f"train recipes/demo.toml {SUMS} sft.steps=0 model.config=none model.path=models/warm",
        "model.tokenizer=none train.updates_per_step=2 algorithm.aggregation=none loop.steps=1",
        f"run.name={name}",
        *words,
    )


def word_problems(count: int, seed: int) -> str:
    """Return made-up word problems in the format of GSM8K's files.

    Args:
        count: The number of problems.
        seed: Which problems.
    """

    def lines() -> Iterator[str]:
        for i in range(seed, seed + count):
            bags, pens, lost = 2 + i * 7 % 11, 3 + i * 5 % 13, 1 + i % 5
            answer = (
                f"There are {bags} x {pens} = <<{bags}*{pens}={bags * pens}>>{bags * pens} pens.\n"
            )
            answer += f"{bags * pens - lost} are left.\n#### {bags * pens - lost}"
            question = f"Ann has {bags} bags of {pens} pens and loses {lost}. How many are left?"
            yield json.dumps({"question": question, "answer": answer})

    return "\n".join(lines()) + "\n"


CASES = (
    Case(
        "demo",
        "the demo: warm-up, GRPO, evaluation, checkpoints, exports, sampling",
        (
            jetrl(DEMO),
            # By their own names: which of the two a run's name stands for depends on which of them
            # was written last, and they are written side by side.
            jetrl("export runs/demo/model models/bf16 --dtype bfloat16"),
            jetrl("export runs/demo/checkpoints/step_000005 models/fp8 --dtype fp8"),
            jetrl(
                "eval runs/demo/model --samples 2 --prompts 8 --json --device DEVICE",
                output="eval.json",
            ),
            jetrl("sample models/fp8 1+2= --n 4 --json --device DEVICE", output="sample.jsonl"),
        ),
        measures=("eval/arithmetic/mean", "sft/loss"),
    ),
    Case(
        "demo-resume",
        "a demo that BASE stopped after a step",
        (jetrl(DEMO, "loop.steps=5 --resume"),),
        prepared_by=(jetrl(DEMO, "loop.steps=3"),),
    ),
    Case(
        "gsm8k",
        "a model of byte-level BPE on problems in GSM8K's format, scored by a process",
        (
            jetrl(
                "init models/tiny-qwen3-gsm8k --family qwen3 --tokenizer bpe --vocab-size 512",
                "--text data/gsm8k/train.jsonl",
            ),
            jetrl(
                f"train recipes/gsm8k-smoke.toml {COMMON} rollout.max_tokens=48 task.workers=1",
                "train.tokens_per_micro_batch=512",
                "algorithm.overlong_buffer=24 rollout.temperature=1.2 eval.every=2 eval.prompts=4",
                "eval.max_tokens=16 loop.steps=2",
            ),
        ),
        files={
            "data/gsm8k/train.jsonl": word_problems(120, seed=0),
            "data/gsm8k/test.jsonl": word_problems(20, seed=500),
        },
        measures=("reward/overlong_penalty",),
    ),
    Case(
        "ppo",
        "PPO with a critic and the KL in the reward",
        (jetrl(PPO, "loop.steps=3"),),
        measures=("critic/loss", "reward/kl_penalty"),
    ),
    Case(
        "ppo-resume",
        "a run of PPO that BASE stopped",
        (jetrl(PPO, "loop.steps=4 --resume"),),
        prepared_by=(jetrl(PPO, "loop.steps=2"),),
        measures=("critic/loss",),
    ),
    Case(
        "mix",
        "two tasks by weight, in an order by pass rate, DAPO with dynamic sampling",
        (
            jetrl(
                f"train recipes/demo.toml {SUMS} run.name=mix {MIX} sft.steps=0",
                "task.eval_split=test data.order=pass_rate algorithm.name=dapo",
                "algorithm.aggregation=none algorithm.dynamic_sampling_rounds=3 eval.every=2",
                "rollout.page_size=4 rollout.num_pages=16 rollout.max_batch_size=10",
                "rollout.max_prefill_tokens=24 rollout.keep_every=2",
                "checkpoint.every=1 loop.steps=4",
            ),
        ),
        files={"lengths.py": TASK_OF_A_USER},
        measures=("dynamic_sampling/dropped_groups", "reward/task/lengths"),
    ),
    Case(
        "partial",
        "partial rollouts: completions that several steps draw",
        (jetrl(PARTIAL),),
        files={"lengths.py": TASK_OF_A_USER},
        measures=("partial_rollout/earlier_tokens", "partial_rollout/unfinished"),
    ),
    Case(
        "partial-resume",
        "a run with partial rollouts that BASE stopped",
        (jetrl(PARTIAL, "loop.steps=5 --resume"),),
        prepared_by=(jetrl(PARTIAL, "loop.steps=3"),),
        files={"lengths.py": TASK_OF_A_USER},
        measures=("partial_rollout/earlier_tokens",),
    ),
    Case(
        "sft",
        "supervised training, and the model that it writes",
        (jetrl(SFT),),
        measures=("sft/loss", "sft/grad_norm"),
    ),
    Case(
        "sft-resume",
        "supervised training of BASE, killed after 10 updates",
        (jetrl(SFT, "--resume"),),
        prepared_by=(jetrl(SFT, killed_at="runs/warm/checkpoints/sft/step_*10/manifest.json"),),
        measures=("sft/loss",),
    ),
    Case(
        "reward-model",
        "a reward model from pairs, and GRPO on its scores",
        (
            jetrl(REWARD_MODEL),
            jetrl(
                f"train recipes/demo.toml {SUMS} run.name=judged sft.steps=30 loop.steps=2",
                "reward.model=0.5 reward.model_path=models/judge",
            ),
        ),
        measures=("reward_model/accuracy", "reward_model/eval_accuracy"),
    ),
    Case(
        "reward-model-resume",
        "the training of a reward model of BASE, killed after 10 updates",
        (jetrl(REWARD_MODEL, "--resume"),),
        prepared_by=(
            jetrl(REWARD_MODEL, killed_at="runs/judge/checkpoints/sft/step_*10/manifest.json"),
        ),
        measures=("reward_model/accuracy",),
    ),
    Case(
        "calibrated",
        "calibrated clipping, and pairs drawn by Shuffle-R1",
        (
            jetrl(
                f"train recipes/demo.toml {SUMS} {LENGTHS} run.name=calibrated sft.steps=0",
                "algorithm.calibrate_clip_every=2 algorithm.clip=0.05 train.lr=1e-2",
                "train.updates_per_step=2",
            ),
            jetrl(
                f"train recipes/demo.toml {SUMS} run.name=pairs train.updates_per_step=2",
                "data.batch=shuffle_r1 loop.steps=2",
            ),
        ),
        files={"lengths.py": TASK_OF_A_USER},
        measures=("policy/clip_low", "policy/clip_high"),
    ),
    Case(
        "turns",
        "completions of several turns with a calculator",
        (jetrl(TURNS),),
        measures=("response_length/turns", "response_length/sampled"),
    ),
    Case(
        "turns-resume",
        "a run of several turns that BASE stopped",
        (jetrl(TURNS, "loop.steps=3 --resume"),),
        prepared_by=(jetrl(TURNS, "loop.steps=2"),),
        measures=("response_length/turns",),
    ),
    Case(
        "plans",
        "the plans mixed (corrected by TIS) and jet, three updates a step, a KL reference",
        (
            jetrl(
                f"train recipes/demo.toml {SUMS} run.name=mixed precision.preset=mixed",
                "algorithm.correction=tis loop.steps=2",
            ),
            jetrl(
                f"train recipes/demo.toml {SUMS} run.name=jet precision.preset=jet",
                "train.updates_per_step=3 algorithm.kl=0.05 loop.steps=2",
            ),
        ),
        measures=("mismatch/num_different", "correction/weight_mean", "policy/kl_ref"),
    ),
    Case(
        "algorithms",
        "the other algorithms and corrections, a step each, and a loss of a user's own",
        (
            jetrl(SFT),
            trained("dr_grpo", "algorithm.name=dr_grpo"),
            trained("gspo", "algorithm.name=gspo algorithm.normalize_std=false"),
            trained("cispo", "algorithm.name=cispo rollout.top_p=0.95 rollout.top_k=30"),
            trained("rloo", "algorithm.name=rloo algorithm.kl=0.1"),
            trained("reinforce_pp", "algorithm.name=reinforce_pp algorithm.kl=0.1 loop.steps=2"),
            trained("baseline", "algorithm.name=reinforce_pp_baseline algorithm.kl=0.1"),
            trained("push", "algorithm.name=push.py:push algorithm.options.strength=0.5"),
            trained("mis", "precision.preset=mixed algorithm.correction=mis"),
            trained("icepop", "precision.preset=bf16 algorithm.correction=icepop"),
            trained(
                "mask",
                "precision.preset=mixed algorithm.correction=sequence_mask",
                "algorithm.correction_low=0.9999",
            ),
        ),
        files={"push.py": LOSS_OF_A_USER},
        measures=("policy/kl_ref", "correction/weight_mean"),
    ),
    Case(
        "compact-resume",
        "compact optimizer states, recomputed layers, E5M2, power-of-two scales; BASE stopped it",
        (jetrl(COMPACT, "loop.steps=3 --resume"),),
        prepared_by=(jetrl(COMPACT, "loop.steps=1"),),
    ),
    Case(
        "families",
        "Qwen2 and Llama from files: parity under each plan, and a step in FP32 and in BF16",
        (
            jetrl("init models/qwen2 --family qwen2 --intermediate-size 256"),
            jetrl("init models/llama --family llama --untied --num-layers 1 --dtype fp8"),
            jetrl(
                "parity models/qwen2 --plan unified --max-tokens 24 --json", output="unified.json"
            ),
            jetrl(f"parity models/llama --plan jet {PARITY}", output="jet.json"),
            jetrl(f"parity models/llama --plan mixed {PARITY}", output="mixed.json"),
            trained("qwen2", f"model.path=models/qwen2 precision.preset=fp32 {LENGTHS}"),
            trained("llama", f"model.path=models/llama precision.preset=jet {LENGTHS}"),
        ),
        files={"lengths.py": TASK_OF_A_USER},
    ),
    Case(
        "adapter",
        "low-rank adapters on a frozen base, KL to that base, export and merge",
        (
            jetrl(
                f"train recipes/demo.toml {SUMS} run.name=adapter adapter.kind=lora adapter.rank=3",
                "adapter.alpha=6 algorithm.kl=0.01 sft.lr=1e-2 train.lr=1e-2",
            ),
            jetrl("export runs/adapter models/merged --merge --device DEVICE", output="merge.txt"),
        ),
        measures=("policy/kl_ref",),
    ),
    Case(
        "nvfp4",
        "an adapter on a base in NVFP4, noise on norms, evaluation between",
        (
            jetrl(
                f"train recipes/demo.toml {SUMS} {LENGTHS} run.name=nvfp4 sft.steps=0",
                "adapter.kind=lora adapter.rank=3",
                "precision.base=nvfp4 adapter.noise_start=0.05 adapter.noise_end=0.01",
                "adapter.noise_stages=2 sft.lr=1e-2 train.lr=1e-2 eval.every=2",
            ),
        ),
        files={"lengths.py": TASK_OF_A_USER},
        measures=("noise/sigma",),
    ),
    Case(
        "dataset",
        "rows of one's own as chat messages, with worked answers and a checker",
        (
            jetrl("init models/chat --tokenizer bpe --vocab-size 320 --text data/mine.jsonl"),
            jetrl(
                f"train recipes/demo.toml {SUMS} run.name=dataset model.config=none",
                "model.tokenizer=none model.path=models/chat task.name=dataset task.options={}",
                "task.path=data/mine.jsonl task.options.prompt=ask task.options.answer=right",
                "task.options.demonstration=worked task.options.checker=regex",
                r"task.options.pattern=([0-9]) task.system_prompt=Count.",
                "sft.steps=20 rollout.prompts_per_step=3 rollout.samples_per_prompt=8",
                "train.tokens_per_micro_batch=256",
                "eval.every=2 eval.samples=2 eval.temperature=1.0 loop.steps=2",
            ),
        ),
        files={"data/mine.jsonl": ROWS},
        measures=("sft/loss", "reward/part/answered"),
    ),
)
