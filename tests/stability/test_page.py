"""The page says what the records hold, in any browser, with nothing but itself."""

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from stability import page
from stability.claims import Claim
from stability.figures import Plate
from stability.gather import Gathered, gather
from stability.judging import Judged
from stability.page import publish, render
from tests.stability.test_gather import break_five, lines_of, write_run, write_study

CLAIM = {"says": "it is so", "source": "Someone 2020", "of": {"arm": "pre"}, "knobs": {}, "expect": {"max": 1.0}}
EVIL = "<script>alert('x')</script> & \"quoted\" grün"


def plates(entries: Any) -> Iterator[Plate]:
    """Two figures: one small, one that is large as an SVG."""
    for name, points in (("small", 3), ("large", 7_000)):
        figure = Figure(figsize=(9, 3))
        figure.subplots().plot([place % 7 for place in range(points)], "o")
        yield Plate(name, f"A {name} one", f"Of {len(entries)} runs, {EVIL}", figure)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of twenty runs of which five are broken."""
    directory = tmp_path_factory.mktemp("page") / "twenty-laptop"
    write_study(directory)
    break_five(directory)
    (directory / "notes").mkdir()
    environment = {"run": "x", "python": "3.11", "versions": {"torch": "2", "numpy": "3"}, "corpus": {"hash": "abc"}}
    for number, path in enumerate(sorted(directory.glob("pre_*/metrics.jsonl"))):
        (path.parent / "environment.json").write_text(json.dumps(environment | {"run": number, "threads": number % 2}))
    gathered = gather([directory])
    assert gathered.plan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "plates", plates)
        publish(gathered, directory / "report.html", gathered.plan.judged([entry.run for entry in gathered.entries]))
    return directory


def text_of(html: str) -> str:
    """What is read, in one line."""
    body = html[html.index("<body>") : html.index("<script>")]
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", body)).split())


def test_the_page_says_what_became_of_all(study: Path):
    html = (study / "report.html").read_text()
    said = text_of(html)
    assert said.startswith('twenty Does it "learn"? study twenty, scale laptop 20 runs: 16 stable, 2 no record, ')
    assert "1 of 3 claims hold, 1 undecided; 1 not judged at this scale; 2 of 20 runs are missing." in said
    for part in (
        "fails it learns all measured summary key=final_loss expected <= 2.7 found 3.286 to 4.714 (0 of 3 hold) because 3 of 3 numbers not <= 2.7; unknown: pre seed=4 lr=0.1: has not run",
        "bound a guess source nobody & co",
        "not judged at length measured summary key=final_loss expected <= 9 found judged at scale gpu alone",
        "measured gradient matrix=q layer=last gradient: The gradient norm of a matrix",
        "pre seed=0 lr=0.1 no record has not run: pre_seed=0_lr=0.1 is missing",
        "pre seed=1 lr=0.1 stable metrics.jsonl is truncated: it has 3 steps, summary.json says 5; line 4",
        "pre seed=2 lr=0.1 interrupted interrupted: signal 15 after step 3",
        "pre seed=3 lr=0.1 diverged diverged at step 1: not finite from step 1 on",
        "pre seed=4 lr=0.1 no record has not run: pre_seed=4_lr=0.1: no run: a run holds",
        "notes left out is empty",
        "All runs share: python 3.11 corpus hash abc packages torch 2, numpy 3 They differ in: what value runs threads 0 9 runs:",
        "settings that all runs share steps 200 model.depth 3 clip 1",
        "To repeat it In a checkout of normlab: python train.py study=twenty study.scale=laptop "
        + shlex.quote("name=it's"),
        "pre seed=4 lr=0.0001 python train.py seed=4 optimizer.lr=0.0001 model.depth=3",
    ):
        assert part in said, part


def test_a_claim_says_what_its_names_stand_for():
    claim = Claim.model_validate(CLAIM | {"observe": "below_entropy", "along": "model.depth", "take": "exponent"})
    assert page._claim(Judged("x", claim, "undecided", [], "has not run"))["meanings"] == [
        "below_entropy: unigram entropy - final loss, in nats: above 0 where more was learnt than how frequent each token is",
        "exponent: p of y ~ x^p: the least-squares slope of log y on log x",
    ]


def test_the_commands_of_a_few_runs_are_open_and_so_printed(tmp_path: Path):
    for seed in range(9):
        write_run(tmp_path / str(seed), lines_of(3), steps_done=3, seed=seed)
        html = render(gather([tmp_path]))
        assert ("<details open><summary>the command of each run" in html) == (seed < 8)
        assert ('<section id="commands" class="screen">' in html) == (seed == 8)


def test_what_a_name_stands_for_is_said_once():
    claims = [Claim.model_validate(CLAIM | {"observe": name}) for name in ("stable", "stable", "verdict")]
    html = render(Gathered("x", [], [], {}), [Judged("x", claim, "undecided", [], "has not run") for claim in claims])
    assert text_of(html).count("stable: 1 where the verdict is stable or spiky") == 1 and "verdict: " not in html


def test_a_column_that_no_run_fills_is_left_out(tmp_path: Path):
    write_run(tmp_path / "a", lines_of(3), steps_done=3)
    assert "first bad step" not in text_of(render(gather([tmp_path])))
    write_run(tmp_path / "b", lines_of(3), steps_done=3, verdict="diverged", first_bad_step=2)
    html = render(gather([tmp_path]))
    assert html.count('<th scope="col" class="number">first bad step</th>') == 1 and "First bad step: where" in html


def test_an_uncommitted_change_is_said(tmp_path: Path):
    write_run(tmp_path / "a", lines_of(3), steps_done=3)
    (tmp_path / "a/environment.json").write_text(json.dumps({"git": "abc+"}))
    said = text_of(render(gather([tmp_path])))
    assert "git abc, with changes that were not committed" in said and "normlab at the git revision above" in said


def test_figures_are_in_the_page_and_beside_it(study: Path):
    html = (study / "report.html").read_text()
    assert {path.name for path in (study / "figures").iterdir()} == {f"{n}.{e}" for n in ("small", "large") for e in ("png", "svg")}  # fmt: skip
    svg = (study / "figures/small.svg").read_text()
    assert "<dc:date>" not in svg and "<text" not in svg  # the same file every time, the same letters everywhere
    assert html.count('src="data:image/svg+xml;base64,') == html.count('src="data:image/png;base64,') == 1
    assert (study / "figures/large.svg").stat().st_size > page.BYTES
    assert html.count('alt="A small one. Of 20 runs, &lt;script&gt;') == 1 and "Of 20 runs, <script" not in html


@pytest.mark.slow
def test_the_same_runs_give_the_same_page(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(page, "plates", plates)
    gathered = gather([study])
    for name in ("a", "b"):
        publish(gathered, tmp_path / name / "report.html")
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.*"))
    assert len(files) == 5 and all(
        (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes() for file in files
    )


def test_what_a_name_holds_is_text(tmp_path: Path):
    for seed in (0, 1):
        write_run(
            tmp_path / f"{seed}{EVIL.replace('/', '')}", lines_of(3), name=EVIL, verdict=EVIL, steps_done=7, reason=EVIL
        )
    html = render(gather([tmp_path]))
    assert "<script>alert" not in html and html.count("<script>") == 1
    assert EVIL in text_of(html) and 'class="badge other"' in html


def test_a_page_without_study_or_faults_has_no_sections_for_them(tmp_path: Path):
    write_run(tmp_path / "a", lines_of(3), steps_done=3)
    html = render(gather([tmp_path]))
    assert re.findall(r'<section id="(\w+)"', html) == ["runs", "environment", "commands"]
    assert "what is wrong" not in html and "Without an environment.json: 1 run: run 0." in text_of(html)


# ------------------------------------------------------------------------------------------------------------- a browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


class Visit:
    """A page open in the browser, with all that it asked for and complained of."""

    def __init__(self, browser: Any, path: Path, **named: Any) -> None:
        self.asked: list[str] = []
        self.errors: list[str] = []
        self.page = browser.new_page(**named)
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.route(
            "**/*", lambda route: route.continue_() if route.request.url == path.as_uri() else route.abort()
        )
        self.page.goto(path.as_uri())

    def column(self, head: str) -> list[str | None]:
        """The values of a column of the table of runs, from top to bottom."""
        heads = self.page.locator("table.sortable thead th").all_text_contents()
        rows = "rows => rows.map(row => [...row.cells].map(cell => cell.dataset.value ?? null))"
        return [row[heads.index(head)] for row in self.page.eval_on_selector_all("table.sortable tbody tr", rows)]


@pytest.fixture
def visit(browser: Any, study: Path) -> Iterator[Visit]:
    opened = Visit(browser, study / "report.html", viewport={"width": 1280, "height": 900})
    yield opened
    opened.page.close()


def test_it_asks_for_nothing_and_complains_of_nothing(visit: Visit, study: Path):
    visit.page.locator("summary").first.click()
    assert [url for url in visit.asked if not url.startswith("data:")] == [(study / "report.html").as_uri()]
    assert visit.errors == []
    assert visit.page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")


def test_its_numbers_are_those_of_the_summaries(visit: Visit, study: Path):
    by_name = {
        f"pre seed={name[9]} lr={name[14:]}": name
        for name in (path.parent.name for path in study.glob("*/summary.json"))
    }
    for head, (key, _) in page.COLUMNS.items():
        found = dict(zip(visit.column("run"), visit.column(head), strict=True))
        for name, directory in by_name.items():
            value = json.loads((study / directory / "summary.json").read_text())[key]
            assert found[name] == (None if value is None else json.dumps(value)), (name, head)
    texts = visit.page.locator("table.sortable tbody tr").last.locator("td").all_text_contents()
    assert texts == [
        "stable",
        "pre",
        "4",
        "0.0001",
        "4.7143",
        "2.0500",
        "4.8143",
        "–",
        "5 / 5",
        "10,009",
        "10.5",
        "512 MiB",
    ]


@pytest.mark.parametrize("head", ["optimizer.lr", "final loss", "tokens/s", "verdict"])
def test_a_click_or_a_key_on_a_head_sorts(visit: Visit, head: str):
    before = visit.column(head)
    known = [value for value in before if value is not None]
    known.sort(key=float if head != "verdict" else str)
    missing: list[str | None] = [None] * (len(before) - len(known))
    cell = visit.page.locator("table.sortable thead th").filter(has_text=re.compile(f"^{re.escape(head)}$"))
    cell.click()
    assert visit.column(head) == known + missing and cell.get_attribute("aria-sort") == "ascending"
    cell.focus()
    visit.page.keyboard.press("Enter")
    assert visit.column(head) == known[::-1] + missing and cell.get_attribute("aria-sort") == "descending"
    assert (
        len(visit.page.locator("th[aria-sort=none]").all())
        == len(visit.page.locator("table.sortable thead th").all()) - 1
    )


def test_a_phone_shows_it_without_a_second_direction(browser: Any, study: Path):
    narrow = Visit(browser, study / "report.html", viewport={"width": 390, "height": 844}, is_mobile=True)
    for details in narrow.page.locator("details").all():
        details.locator("summary").first.click()
    assert narrow.page.evaluate("document.documentElement.scrollWidth") == 390
    wide = narrow.page.locator(".scroll").first
    assert wide.evaluate("node => getComputedStyle(node).overflowX") == "auto"
    assert narrow.page.locator("figure img").first.bounding_box()["width"] >= 600
    narrow.page.close()


def test_it_prints_on_a4(visit: Visit):
    assert visit.page.locator("button").first.is_visible()
    visit.page.emulate_media(media="print")
    assert not any(button.is_visible() for button in visit.page.locator("button").all())
    assert visit.page.locator("table.sortable thead th").first.is_visible()
    visit.page.set_viewport_size({"width": 703, "height": 1000})  # A4 less its margins
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= 703
    assert visit.page.pdf(prefer_css_page_size=True).startswith(b"%PDF")


def test_a_command_is_copied(visit: Visit):
    visit.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    visit.page.locator("button").first.click()
    visit.page.locator("button", has_text="copied").wait_for()
    assert visit.page.evaluate("navigator.clipboard.readText()").startswith("python train.py study=twenty ")
