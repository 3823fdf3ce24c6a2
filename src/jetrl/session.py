"""What a run is made of, and the verbs that the loop is written in.

A session opens everything that a run needs (task, policy, engine, trainer, scorer, run directory,
console), goes on from the last good checkpoint if asked to, and closes it all in any case, with a
report. All randomness is counted: the prompts of a step and the draws of a completion depend on the
seed, the step and the prompt alone, so a resumed run continues with the bits of an uncut one.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from jetrl.building import build_policy, build_reference
from jetrl.config import Settings
from jetrl.errors import MismatchError, RunStopped, UserError
from jetrl.evaluate import (
    EncodedPrompt,
    Evaluation,
    encode_prompts,
    evaluate,
    sample_prompts,
    score_completions,
    with_stops,
)
from jetrl.models.chat import encode_text
from jetrl.parity import locate
from jetrl.precision import PrecisionPlan
from jetrl.randomness import derive_seed, draw_indices
from jetrl.rollout.engine import RolloutEngine
from jetrl.rollout.progress import Progress
from jetrl.runs import Console, RunDirectory, open_trackers, write_report
from jetrl.step_metrics import eval_metrics, sample_metrics
from jetrl.tasks import Scorer, get_task, read_prompts
from jetrl.training import Checkpoints, SftTrainer, StepMismatchError, Trainer
from jetrl.types import Completion, Sample, SamplingParams, StepStats

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunResult:
    """What a run left: its directory, report.html (None if reports are off), the last checkpoint
    (None if none was written), the exported Hugging Face directory, and RL steps done."""

    run_path: Path
    report_path: Path | None
    checkpoint_path: Path | None
    model_path: Path | None
    steps: int


class Session:
    """One attempt at a run. Use it as a context; see `jetrl.loop.train` for the order of calls."""

    def __init__(self, settings: Settings, resume: bool = False) -> None:
        self.settings = settings
        self._resume = resume
        self._stack = contextlib.ExitStack()
        self._stop_reason = ""
        self._step = 0
        self._rollout_tokens = 0
        self._timings: dict[str, float] = {}

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def _open(self, stack: contextlib.ExitStack) -> None:
        settings = self.settings
        RunDirectory.check_name(settings, resume=self._resume)
        task = settings.task
        self.plan = PrecisionPlan.from_settings(settings.precision)
        options: dict[str, Any] = dict(task.options)
        self.task = get_task(task.name, path=task.path, **options)
        self.policy = build_policy(settings, self.plan, self.task)
        self._prompts = self._encode(task.split)
        self._eval_prompts = (
            self._encode(task.eval_split, settings.eval.prompts)
            if settings.eval.every or settings.sft.until is not None
            else []
        )
        self._scorer = stack.enter_context(
            Scorer(task.name, task.path, options, task.workers, task.timeout_s)
        )
        run = RunDirectory.create(settings, self.plan.to_dict(), resume=self._resume)
        stack.callback(self._write_report)  # last, when the run's end is recorded
        self.run = stack.enter_context(run)
        self._checkpoints = Checkpoints(self.run.checkpoints_dir, settings.checkpoint.keep_last)
        self._attempt = stack.enter_context(
            self.run.attempt(sys.argv, {"plan": self.plan.name, "device": str(self.policy.device)})
        )
        self._trackers = open_trackers(
            settings.trackers.names,
            settings.trackers.project,
            self.run.path,
            settings.model_dump(mode="json"),
        )
        stack.callback(self._trackers.close)
        rollout = settings.rollout
        self._engine = RolloutEngine(
            self.policy,
            max_batch_size=rollout.max_batch_size,
            num_pages=rollout.num_pages,
            page_size=rollout.page_size,
            max_prefill_tokens=rollout.max_prefill_tokens,
        )
        self._began = time.monotonic() - self.run.history().elapsed_s
        stack.enter_context(self._signals())
        self._console: Console | None = None
        stack.callback(self._close_console)
        self._trainer: Trainer | None = None
        self._load()

    def _encode(self, split: str, limit: int = 0) -> list[EncodedPrompt]:
        prompts = read_prompts(self.task, split)[: limit or None]
        where = f"task {self.task.label}, split {split}"
        return encode_prompts(self.policy, prompts, where, self.settings.task.system_prompt)

    # Opening, resuming

    def _load(self) -> None:
        """Go on from the last good checkpoint, if this is a resumed run that has one."""
        if not self._resume:
            return
        if not self._checkpoints.steps():
            self.run.truncate_after(-1, "sft")
            for note in (*self.run.notes, "no checkpoint yet: the run begins anew"):
                self.console.note(note)
            self._close_console()
            return
        latest = self._checkpoints.latest()
        self._open_trainer()
        loaded = self._checkpoints.load(latest.path, self.policy, self.trainer.optimizer)
        self._step = loaded.step
        self.run.truncate_after(self._step)
        last = max((r["step"] for r in self.run.metrics("rl")), default=-1)
        if last < self._step:  # the run was cut between the checkpoint and its line
            self.run.write_step(StepStats(self._step, loaded.extra["metrics"]))
        for note in (*self.run.notes, *latest.notes, f"resumed after step {self._step}"):
            self.console.note(note)

    @property
    def trainer(self) -> Trainer:
        assert self._trainer is not None, "the warm-up comes first"
        return self._trainer

    def _open_trainer(self) -> None:
        """After the warm-up: the optimizer of RL starts anew, and the reference is frozen here."""
        reference = build_reference(self.settings, self.policy, self.run.path)
        self._trainer = Trainer(self.policy, self.settings, reference)

    @property
    def console(self) -> Console:
        if self._console is None:
            self._console = Console(
                self.settings.loop.steps,
                first_step=self._step,
                elapsed_s=time.monotonic() - self._began,
            )
        return self._console

    def _close_console(self) -> None:
        if self._console is not None:
            self._console.close()
            self._console = None

    # The verbs of the loop

    def warm_up(self) -> None:
        """Supervised training on the task's worked answers, if the settings ask for it. A resumed
        run has it behind it when there is a checkpoint: the first one is written here."""
        if self._trainer is not None:
            return
        steps = self.settings.sft.steps
        if steps:
            self._console = Console(steps, title="sft", samples_every=0, lines_every=25)
            trainer = SftTrainer(self.policy, self.settings)
            for step in range(1, steps + 1):
                chosen = draw_indices(
                    len(self._prompts),
                    self.settings.sft.examples_per_step,
                    step,
                    self._seed("sft"),
                )
                began = time.monotonic()
                metrics = trainer.step([self._example(self._prompts[i]) for i in chosen])
                metrics["timing/step_s"] = time.monotonic() - began
                stats = StepStats(step, metrics)
                self.run.write_step(stats, "sft")
                self._console.step(stats)
                if self._stop_reason == "interrupted":
                    raise KeyboardInterrupt
                if self._warm_enough(step):
                    break
            self._close_console()
        self._open_trainer()

    def evaluate_start(self) -> None:
        """Held-out evaluation before the first step, and the checkpoint that follows a warm-up."""
        if self._step > 0 or self.run.metrics("rl"):
            return
        metrics = self.evaluate(0)
        if self.settings.sft.steps:
            self._save_checkpoint(0, metrics)
        if metrics:
            stats = StepStats(0, metrics)
            self.run.write_step(stats)
            self.console.step(stats)
            self._trackers.log(0, metrics)

    def steps(self) -> Iterator[int]:
        """The steps still to do, until one of them asked to stop."""
        while self._step < self.settings.loop.steps and not self._stop_reason:
            yield self._step + 1
            hours = (time.monotonic() - self._began) / 3600
            limit = self.settings.run.max_hours
            if limit is not None and hours >= limit and not self._stop_reason:
                self._stop_reason = f"run.max_hours = {limit} reached"

    def draw_prompts(self, step: int) -> list[EncodedPrompt]:
        """The step's prompts: each epoch is a shuffle of its own, and none is skipped."""
        self._timings = {"step": time.monotonic()}
        count = self.settings.rollout.prompts_per_step
        chosen = draw_indices(len(self._prompts), count, step, self._seed("prompts"))
        return [self._prompts[i] for i in chosen]

    def sample(self, prompts: Sequence[EncodedPrompt], step: int) -> list[Completion]:
        """samples_per_prompt completions of each prompt, with their log-probs."""
        rollout = self.settings.rollout
        params = SamplingParams(
            n=rollout.samples_per_prompt,
            max_tokens=rollout.max_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop=rollout.stop,
            seed=derive_seed(self.settings.run.seed, "rollout", step),
        )
        with self._phase("rollout"):
            params = with_stops(params, self.task)
            completions = sample_prompts(self._engine, prompts, params, self._show)
        self._rollout_tokens = sum(len(c.token_ids) for c in completions)
        return completions

    def score(
        self, prompts: Sequence[EncodedPrompt], completions: Sequence[Completion]
    ) -> list[Sample]:
        """Every completion's reward.

        Raises:
            RunStopped: not one of them could be judged.
        """
        with self._phase("reward"):
            samples = score_completions(self._scorer, prompts, completions)
        failures = [s.failure for s in samples if s.failure]
        if failures:
            logger.warning("%d completions not judged; the first: %s", len(failures), failures[0])
        if len(failures) == len(samples):
            raise RunStopped(
                f"none of the step's {len(samples)} completions could be judged by task "
                f"{self.task.label}; the first failure: {failures[0]}"
            )
        return samples

    def update(self, step: int, samples: Sequence[Sample]) -> dict[str, float]:
        """Train on the samples: advantages, packing, updates, requantize. Returns metrics.

        Raises:
            MismatchError: sampler and trainer differ under an exact plan; names the operation.
        """
        self._phase_name("update")
        if self.policy.device.type == "cuda":
            self._engine.free_cache()  # its pages took what was free; training needs it now
        try:
            metrics = self.trainer.step(samples)
        except StepMismatchError as error:
            self.run.write_rollouts(step, samples)
            raise MismatchError(f"step {step}: {error}; {self._locate(error)}") from None
        self._timings |= self.trainer.timings
        return sample_metrics(samples) | metrics

    def evaluate(self, step: int) -> dict[str, float]:
        """Held-out metrics of a step, if one is due: at the start, every eval.every, at the end."""
        settings = self.settings.eval
        due = settings.every and (step % settings.every == 0 or step == self.settings.loop.steps)
        if not due:
            return {}
        result = self._held_out()
        return eval_metrics(self.task.label, result) | {"timing/eval_s": self._timings["eval"]}

    def record(self, step: int, samples: Sequence[Sample], metrics: dict[str, float]) -> None:
        """Write the step down: rollouts, checkpoint if due, metrics, console. In this order, so
        that a checkpoint's step is always there when a run goes on from it."""
        self.run.write_rollouts(step, samples)
        self._step = step
        metrics = {**metrics, **self._measured(samples)}
        settings = self.settings
        due = bool(settings.checkpoint.every) and step % settings.checkpoint.every == 0
        if due or step == settings.loop.steps or self._stop_reason:
            metrics["timing/checkpoint_s"] = self._save_checkpoint(step, metrics)
        metrics["timing/step_s"] = time.monotonic() - self._timings["step"]
        stats = StepStats(step, metrics, samples)
        self.run.write_step(stats)
        self.console.step(stats)
        self._trackers.log(step, metrics)

    def finish(self, out: str | Path | None = None) -> RunResult:
        """Export the model, say what is where, and end.

        Raises:
            KeyboardInterrupt: the run was asked to stop by Ctrl-C.
        """
        if self._stop_reason:
            saved = self._checkpoints.steps()
            if not saved or saved[-1] < self._step:
                self._save_checkpoint(self._step, {})
            self.console.note(f"stopped after step {self._step}: {self._stop_reason}")
            if self._stop_reason == "interrupted":
                raise KeyboardInterrupt
            self._attempt.end("stopped", self._stop_reason)
        model = self.run.path / "model"
        self.policy.save_pretrained(model, overwrite=True)
        if out is not None:
            self.policy.save_pretrained(out)
        self._close_console()
        steps = self._checkpoints.steps()
        return RunResult(
            run_path=self.run.path,
            report_path=self.run.path / "report.html" if self.settings.report.enabled else None,
            checkpoint_path=self._checkpoints.path(steps[-1]) if steps else None,
            model_path=model,
            steps=self._step,
        )

    # What the verbs are made of

    def _held_out(self) -> Evaluation:
        settings = self.settings.eval
        params = SamplingParams(
            n=settings.samples,
            max_tokens=settings.max_tokens or self.settings.rollout.max_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            stop=self.settings.rollout.stop,
            seed=derive_seed(self.settings.run.seed, "eval"),
        )
        with self._phase("eval"):
            result = evaluate(
                self._engine,
                self._scorer,
                self._eval_prompts,
                with_stops(params, self.task),
                settings.threshold,
                self._show,
            )
        return result

    def _warm_enough(self, step: int) -> bool:
        """Whether the warm-up may end here: the held-out reward has reached sft.until."""
        sft = self.settings.sft
        if sft.until is None or step % sft.check_every:
            return False
        reached = self._held_out().mean
        self.console.note(f"held-out reward {reached:.3f} after {step} supervised updates")
        return reached >= sft.until

    def _seed(self, use: str) -> int:
        return derive_seed(self.settings.run.seed, use)

    def _example(self, encoded: EncodedPrompt) -> tuple[list[int], list[int]]:
        """(prompt ids, worked answer with its end).

        Raises:
            UserError: the task has no worked answers, or the model no tokenizer to write them in.
        """
        tokenizer = self.policy.tokenizer
        answer = self.task.demonstration(encoded.prompt)
        if answer is None or tokenizer is None:
            raise UserError(
                f"supervised training needs worked answers, and task {self.task.label} has "
                f"none for prompt {encoded.prompt.id!r}; set sft.steps=0, or give the task "
                "a demonstration method"
            )
        ids = encode_text(tokenizer, answer, begin=False)
        if tokenizer.eos_token_id is not None:
            ids = [*ids, tokenizer.eos_token_id]
        return list(encoded.token_ids), ids

    def _measured(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Times, speeds and memory of the step so far."""
        timings = self._timings
        trained = sum(len(s.prompt_token_ids) + len(s.completion.token_ids) for s in samples)
        return {
            **{f"timing/{n}_s": timings[n] for n in ("rollout", "reward", "update", "requantize")},
            "throughput/rollout_tokens_per_s": self._rollout_tokens / timings["rollout"],
            "throughput/train_tokens_per_s": trained / timings["update"],
            "memory/peak_gib": self._peak_bytes() / 2**30,
        }

    def _peak_bytes(self) -> int:
        """The most memory used so far: of the GPU if the policy is on one, else of the process."""
        if self.policy.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.policy.device)
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def _save_checkpoint(self, step: int, metrics: dict[str, float]) -> float:
        with self._phase("checkpoint"):
            extra = {"metrics": metrics, "seed": self.settings.run.seed}
            self._checkpoints.save(step, self.policy, self.trainer.optimizer, extra)
        return self._timings["checkpoint"]

    def _locate(self, error: StepMismatchError) -> str:
        sample = error.samples[error.sample_ids[0]]
        found = locate(self.policy, sample.prompt_token_ids, sample.completion.token_ids)
        if found is not None:
            return str(found)
        return "no operation differs when the sequence runs alone: it depends on the batch"

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._phase_name(name)
        began = time.monotonic()
        yield
        self._timings[name] = time.monotonic() - began

    def _phase_name(self, name: str) -> None:
        self.console.phase(name)

    def _show(self, progress: Progress) -> None:
        self.console.progress(
            progress.sequences_done, progress.sequences_total, progress.tokens_per_s
        )

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """The first Ctrl-C asks the loop to stop after this step, the second one leaves at once."""

        def stop(number: int, frame: FrameType | None) -> None:
            if self._stop_reason == "interrupted":
                raise KeyboardInterrupt
            self._stop_reason = "interrupted"
            self.console.note("stopping after this step; Ctrl-C again to leave at once")

        try:
            before = signal.signal(signal.SIGINT, stop)
        except ValueError:  # not the main thread: its owner handles signals
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _write_report(self) -> None:
        if self.settings.report.enabled:
            write_report(self.run.path)
