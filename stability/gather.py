"""What a report is about: the runs below some directories, told apart."""

from dataclasses import dataclass, field
from typing import Any

from stability.records import Run


@dataclass(frozen=True, eq=False)
class Entry:
    """One run of a report.

    `name` tells it apart, and `group` does without the seed: runs of one group are one line with a band. `facts` is the
    same as data: key -> value, `arm` first in a study, then only what is not the same in all (`model.depth`, `seed`).
    `run` is None where there is nothing to read, and `why` says why; `why` is also what is wrong with a run that can be read.
    """

    name: str
    group: str
    facts: dict[str, Any] = field(default_factory=dict)
    run: Run | None = None
    why: str = ""
