"""How a run ends: the checkpoint of its last whole step, the exported model, and what it left."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jetrl.errors import Terminated
from jetrl.session.checkpoints import RunCheckpoints
from jetrl.session.display import Display
from jetrl.session.open import RunContext
from jetrl.session.phases import Phases
from jetrl.session.stop_signals import StopSignals
from jetrl.training import Trainer


@dataclass(frozen=True)
class RunResult:
    """What a run left: its directory, report.html (None if reports are off), the last checkpoint
    (None if none was written), the exported Hugging Face directory, and RL steps done. stopped: why
    it ended before its last step, "" if it did not."""

    run_path: Path
    report_path: Path | None
    checkpoint_path: Path | None
    model_path: Path | None
    steps: int
    stopped: str = ""


class Ending:
    """Ends a run whose parts are open."""

    def __init__(
        self,
        parts: RunContext,
        saved: RunCheckpoints,
        stops: StopSignals,
        phases: Phases,
        display: Display,
    ) -> None:
        self._parts, self._saved, self._stops = parts, saved, stops
        self._phases, self._display = phases, display
        self._stopped = False

    def stop(self, step: int, trainer: Trainer | None) -> None:
        """A checkpoint of the last whole step, if that has none. Once: a second call does nothing.

        Args:
            step: the last whole one. trainer: None in the warm-up, which saves itself.
        """
        if trainer is None or self._stopped:
            return
        with self._phases.phase("checkpoint"):
            self._saved.wait()
            last = self._saved.good_step
            if last is None or last < step:
                self._saved.save(step, trainer, {})
                self._saved.wait()
        self._display.note(f"stopped after step {step}: {self._stops.reason}")
        self._stopped = True

    def cut(self, error: BaseException | None, step: int, trainer: Trainer | None) -> None:
        """What is still done when the run is left: after a step that was given up, its checkpoint;
        after an error, the one on its way."""
        if error is None or self._stops.at_once:
            return
        if isinstance(error, Terminated):
            self.stop(step, trainer)
            return
        self._saved.settle()

    def export(self, step: int, out: str | Path | None) -> RunResult:
        """The model as a Hugging Face directory, in the run and at `out` if given."""
        parts, model = self._parts, self._parts.run.path / "model"
        with self._phases.phase("export"):
            parts.policy.save_pretrained(model, overwrite=True)
            if out is not None:
                parts.policy.save_pretrained(out)
            self._saved.wait()
        self._display.close()
        return RunResult(
            run_path=parts.run.path,
            report_path=parts.run.path / "report.html" if parts.settings.report.enabled else None,
            checkpoint_path=self._saved.last_path,
            model_path=model,
            steps=step,
            stopped=self._stops.reason,
        )
