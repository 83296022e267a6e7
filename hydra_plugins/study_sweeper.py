"""Hydra finds a sweeper below `hydra_plugins` and nowhere else."""

from collections.abc import Sequence
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.types import Override, Quote, QuotedString

from conf.sweep import Remember


class StudySweeper(BasicSweeper):
    """Runs the jobs of a study, as `Remember` has them. They know nothing of it: each is a run that its own words repeat, in a
    directory with a name in place of a number."""

    def sweep(self, arguments: list[str]) -> Any:
        sweep = Remember.sweep
        if sweep is None or sweep.study is None:
            raise ValueError("hydra.callbacks.remember is missing: a study needs it")
        firsts = [
            next(job.words for job in sweep.points if job.arm == arm) for arm in {job.arm: 0 for job in sweep.points}
        ]
        super().validate_batch_is_legal([[*words, *self._launcher()] for words in firsts])
        sweep.plan().write(sweep.directory)
        print(f"{sweep.study.question}\nscale {sweep.study.scale}, in {sweep.directory}", flush=True)
        return super().sweep(arguments)

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Done by now, before a directory was made, and for the first run of each arm: all of them would take minutes, and
        what is wrong with a value its own run says."""

    def split_arguments(  # type: ignore[override]
        self, overrides: list[Override], max_batch_size: int | None
    ) -> list[list[list[str]]]:
        assert Remember.sweep is not None
        here = [*self._launcher(), "hydra.mode=MULTIRUN", f"hydra.sweep.dir={_quoted(str(Remember.sweep.directory))}"]
        words = [[*job.words, *here, f"hydra.sweep.subdir={_quoted(job.name)}"] for job in Remember.sweep.points]
        return list(self.split_overrides_to_chunks(words, max_batch_size))

    def _launcher(self) -> list[str]:
        """What its jobs are told of the study's launcher, of which a typed `hydra.launcher.n_jobs=1` is a key."""
        assert self.config is not None
        hydra = self.config.hydra
        typed = any(word.startswith("hydra/launcher=") for word in hydra.overrides.hydra)
        return [] if typed else [f"hydra/launcher={hydra.runtime.choices['hydra/launcher']}"]


def _quoted(text: str) -> str:
    return QuotedString(text, Quote.single).with_quotes()
