"""A report as one HTML page that fetches nothing, and its figures in a folder beside it."""

import inspect
import json
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
from matplotlib.figure import Figure
from tqdm import tqdm

from stability import judging, observables
from stability.claims import Claim, expected
from stability.figures import Plate, plates
from stability.gather import FIGURES, Entry, Gathered
from stability.judging import Judged
from stability.label import words
from stability.observables import OBSERVABLES
from stability.origin import origin, run_commands, study_command, worded
from stability.panel import BLACK, GREEN, GREY, ORANGE, RED, VERDICTS
from stability.takes import TAKES
from stability.whole import replace

COLOURS = VERDICTS | {"holds": GREEN, "fails": RED, "undecided": ORANGE, "failed": BLACK, "refused": BLACK}
MEANINGS = {  # `stability.verdict` in a few words
    "stable": "it learnt, without spikes, and did not diverge",
    "spiky": "at least two loss spikes, or a step that was skipped because its gradient was not finite",
    "stalled": "the loss never got clearly below the unigram entropy: it learnt no more than how frequent each token is",
    "diverged": "loss or gradient not finite, or the loss far above its start for a tenth of the run",
    "too short": "too few steps, or still falling too fast, to tell",
    "interrupted": "a signal ended it",
    "failed": "an error ended it",
    "refused": "its settings were refused before the first step",
    "unfinished": "no verdict yet: still going, or killed",
    "no record": "there is nothing to read",
}
PLAIN = {"verdict", "summary", "mean"}  # of the names in a claim, those that need no sentence
BYTES = 300_000  # an SVG up to this size is shown, a larger one as PNG: a browser draws each of its paths
DPI = 160


@dataclass(frozen=True)
class Cell:
    """What a table shows, and the value that it is sorted by; None where there is none."""

    text: str = "–"
    value: str | None = None
    number: bool = False


@dataclass(frozen=True)
class Shown:
    """A plate once it is written: its image as a data URI, `width` in CSS pixels."""

    name: str
    title: str
    caption: str
    source: str
    width: int


def publish(gathered: Gathered, path: Path, judged: Sequence[Judged] = ()) -> None:
    """Write the page to `path` (HTML), and each figure to the folder `FIGURES` beside it, as PNG and SVG. Raises OSError."""
    folder = path.parent / FIGURES
    folder.mkdir(parents=True, exist_ok=True)
    drawn = tqdm(plates(gathered.entries), desc="drawing", unit=" figures", disable=None, delay=1, leave=False)
    replace(path, render(gathered, judged, [_written(plate, folder) for plate in drawn]))


def render(gathered: Gathered, judged: Sequence[Judged] = (), shown: Sequence[Shown] = ()) -> str:
    """The text of the page."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    engine = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    engine.filters["worded"] = worded
    entries, plan = gathered.entries, gathered.plan
    keys = dict.fromkeys(key for entry in entries for key in entry.facts)
    table = [[_fact(entry.facts[key]) if key in entry.facts else Cell() for key in keys] for entry in entries]
    numeric = [all(cell.number or cell.value is None for cell in column) for column in zip(*table, strict=True)]
    verdicts = Counter(map(verdict, entries))
    numbers = [_numbers(entry) for entry in entries]
    claims, told = [_claim(one) for one in judged], set[str]()
    for claim in claims:  # what a name stands for is said once
        claim["meanings"] = [said for said in claim["meanings"] if said not in told]
        told.update(claim["meanings"])
    heads = [head for place, head in enumerate(COLUMNS) if any(cells[place].value for cells in numbers)]
    return engine.get_template("report.html.jinja").render(
        title=gathered.title,
        plan=plan,
        counts=list(_counts(verdicts, judged)),
        claims=claims,
        keys=dict(zip(keys, numeric, strict=True)),
        rows=[
            (entry.name, verdict(entry), cells, [own for head, own in zip(COLUMNS, its, strict=True) if head in heads])
            for entry, cells, its in zip(entries, table, numbers, strict=True)
        ],
        columns=heads,
        meanings={word: said for word, said in MEANINGS.items() if word in verdicts},
        broken=[(entry.name, verdict(entry), entry.why) for entry in entries if entry.why],
        others=gathered.others,
        figures=shown,
        origin=origin(entries),
        command=study_command(plan) if plan else None,
        commands=run_commands(gathered),
        colours={_slug(word): colour for word, colour in COLOURS.items()},
        grey=GREY,
        slug=_slug,
    )


def verdict(entry: Entry) -> str:
    """What became of a run, in a word or two."""
    return "no record" if entry.run is None else observables.verdict(entry.run).replace("_", " ")


def _counts(verdicts: Counter[str], judged: Sequence[Judged]) -> Iterator[str]:
    total = verdicts.total()
    yield f"{total} run{'s' * (total != 1)}: " + ", ".join(f"{count} {word}" for word, count in verdicts.most_common())
    found = Counter(one.verdict for one in judged)
    if at := found.total() - found["not judged"]:
        open_ = f", {found['undecided']} undecided" if found["undecided"] else ""
        yield f"{found['holds']} of {at} claims hold{open_}"
    if found["not judged"]:
        yield f"{found['not judged']} not judged at this scale"
    if missing := verdicts["no record"]:
        yield f"{missing} of {total} runs {'is' if missing == 1 else 'are'} missing"


# ---------------------------------------------------------------------------------------------------- the table of runs


def _memory(value: float) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


COLUMNS: dict[str, tuple[str, Any]] = {  # head -> key of the summary, how it is written
    "final loss": ("final_loss", "{:.4f}".format),
    "best val loss": ("best_val_loss", "{:.4f}".format),
    "final val loss": ("final_val_loss", "{:.4f}".format),
    "first bad step": ("first_bad_step", "{:.0f}".format),
    "steps": ("steps_done", "{:.0f}".format),
    "tokens/s": ("tokens_per_second", "{:,.0f}".format),
    "seconds": ("wall_time_s", "{:,.1f}".format),
    "peak memory": ("peak_memory_bytes", _memory),
}


def _numbers(entry: Entry) -> list[Cell]:
    run = entry.run
    summary = (run.summary or {}) if run else {}
    cells = {head: _number(summary.get(key), how) for head, (key, how) in COLUMNS.items()}
    if run:
        done = summary.get("steps_done", int(run.step[-1]) if len(run.step) else 0)
        asked = summary.get("steps", run.config.get("steps", "?"))
        cells["steps"] = Cell(f"{_number(done, '{:.0f}'.format).text} / {worded(asked)}", json.dumps(done), True)
    return list(cells.values())


def _number(value: Any, how: Any) -> Cell:
    """`value`: a number of a summary, or None."""
    return Cell() if value is None else Cell(how(value), json.dumps(value), True)


def _fact(value: Any) -> Cell:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    text = f"{value:g}" if isinstance(value, float) else worded(value)
    return Cell(text, json.dumps(value) if number else text, number)


# ----------------------------------------------------------------------------------------------------------- the claims


def _claim(one: Judged) -> dict[str, Any]:
    return {
        "claim": one.claim,
        "verdict": one.verdict,
        "expected": expected(one.claim),
        "found": judging.found(one),
        "reason": one.reason if one.verdict == "fails" else "",
        "measured": measured(one.claim),
        "meanings": list(_meanings(one.claim)),
        "numbers": [
            (label, value if isinstance(value, str) else f"{value:.5g}", value, one.claim.expect.holds(value))
            for label, value in one.numbers
        ],
    }


def measured(claim: Claim) -> str:
    """How a claim comes to its numbers: `gradient layer=first, ratio to arm=pre, exponent along model.depth`."""
    said = [f"{claim.observe} {words(claim.knobs)}".strip()]
    if claim.against is not None:
        said.append(f"{claim.compare} {'to' if claim.compare == 'ratio' else 'from'} {words(claim.against)}")
    if claim.seeds == "mean":
        said.append("mean over seeds")
    if claim.along is not None:
        said.insert(1 if claim.take_first else len(said), f"{claim.take} along {claim.along}")
    return ", ".join(said)


def _meanings(claim: Claim) -> Iterator[str]:
    """What the names that `measured` gives stand for: the first sentence about each."""
    for name, function in ((claim.observe, OBSERVABLES.get(claim.observe)), (claim.take, TAKES.get(claim.take or ""))):
        if name not in PLAIN and (said := inspect.getdoc(function) if function else None):
            sentence = re.split(r"[.](?:\s|$)", said)[0].replace("`", "")
            yield f"{name}: {' '.join(sentence.split())}"


# ---------------------------------------------------------------------------------------------------------- the figures


def _written(plate: Plate, folder: Path) -> Shown:
    png, svg = _drawn(plate.figure, "png", {"Software": None}), _drawn(plate.figure, "svg", {"Date": None})
    replace(folder / f"{plate.name}.png", png)
    replace(folder / f"{plate.name}.svg", svg)
    kind, image = ("svg+xml", svg) if len(svg) < BYTES else ("png", png)
    source = f"data:image/{kind};base64,{b64encode(image).decode()}"
    return Shown(plate.name, plate.title, plate.caption, source, round(plate.figure.get_size_inches()[0] * 96))


def _drawn(figure: Figure, form: str, metadata: Mapping[str, Any]) -> bytes:
    drawn = BytesIO()
    # the same letters on every machine, and the same file for the same runs
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "normlab"}):
        figure.savefig(drawn, format=form, dpi=DPI, metadata=dict(metadata))
    return drawn.getvalue()


def _slug(word: str) -> str:
    """A verdict as a CSS class: whatever else a summary holds has no colour."""
    return word.replace(" ", "-") if word in COLOURS else "other"
