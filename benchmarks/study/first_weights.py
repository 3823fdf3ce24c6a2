"""The weights that runs begin from, compared with those that earlier results began from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.study.collecting import sha256_of_model
from benchmarks.study.plan import PlannedRun
from benchmarks.study.results import Results

from jetrl.errors import UserError


class FirstWeights:
    """The SHA-256 of each model that runs of a study begin from.

    Args:
        runs: The runs that are worked off.
        results: The results of the study so far.
    """

    def __init__(self, runs: Sequence[PlannedRun], results: Results) -> None:
        self._runs, self._results = runs, results
        self._known: dict[str, str] = {}

    def wrong_folders(self) -> dict[str, str]:
        """Return the folders with other weights than results began from, each with a message."""
        wrong = dict[str, str]()
        for folder in filter(None, {run.settings.model.path for run in self._runs}):
            try:
                self.sha256(folder)
            except UserError as error:
                wrong[folder] = str(error)
        return wrong

    def sha256(self, folder: str | None) -> str:
        """Return the SHA-256 of a model's weights; "" for none, or one that is in no folder here.

        Args:
            folder: The setting model.path of a run.

        Raises:
            UserError: Results that are there already began from other weights.
        """
        if folder is None or not (Path(folder) / "config.json").is_file():
            return ""
        if folder not in self._known:
            own = sha256_of_model(Path(folder))
            beginning = [run for run in self._runs if run.settings.model.path == folder]
            for done in filter(None, (self._results.runs.get(run.name) for run in beginning)):
                # Older files have "" for models that no [start] made.
                if done.start_sha256 not in ("", own):
                    raise UserError(
                        f"{folder}: other weights than {done.name} in {self._results.path} "
                        "began from (another machine or version); put that start back from a "
                        "copy, or begin the results anew"
                    )
            self._known[folder] = own
        return self._known[folder]
