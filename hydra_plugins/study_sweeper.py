"""Hydra finds a sweeper below `hydra_plugins` and nowhere else."""

from collections.abc import Sequence
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.types import Override

from conf.study import Study


class StudySweeper(BasicSweeper):
    """Runs the arms of `study` crossed with its params. Its jobs know nothing of it: each is a run that its own words
    repeat, in a directory with a name in place of a number."""

    def sweep(self, arguments: list[str]) -> Any:
        from stability.claims import parse

        assert self.config is not None
        study = Study.of(self.config)
        parse(study.claims, arms=study.arms, params=study.everywhere(), scales=study.scales)  # before the first run
        print(f"{study.question}\nscale {study.scale}, in {self.config.hydra.sweep.dir}", flush=True)
        return super().sweep(arguments)

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """The first run of each arm: all of them would take minutes, and what is wrong with a value its own run says."""
        assert self.config is not None
        super().validate_batch_is_legal(batch[: len(self.config.study.arms)])

    def split_arguments(  # type: ignore[override]
        self, overrides: list[Override], max_batch_size: int | None
    ) -> list[list[list[str]]]:
        assert self.config is not None
        here = ["hydra.mode=MULTIRUN", f"hydra.sweep.dir='{self.config.hydra.sweep.dir}'"]
        words = [
            [*job.words, *here, f"hydra.sweep.subdir='{job.name}'"] for job in Study.of(self.config).jobs(overrides)
        ]
        return list(self.split_overrides_to_chunks(words, max_batch_size))
