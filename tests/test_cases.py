"""Every public fault report that was collected has a test that names it, or a line that says why it cannot occur here.

`@pytest.mark.case("G05 owner/repository PR #1", "L11")` names rows of ../shared/cases.md; one of the places that name a row
says where the report stands, for whoever has no such file.
"""

import ast
import re
from collections import defaultdict

import pytest

from tests.conftest import ROOT, SHARED

ROWS = SHARED / "cases.md"
HEADING = "Public fault reports that cannot occur here"


def collected() -> set[str]:
    """The ids in the first column of the tables."""
    if not ROWS.is_file():
        pytest.skip("cases.md is not here")
    return set(re.findall(r"^\| ([A-Z]\d\d) \|", ROWS.read_text(encoding="utf-8"), re.M))


def marked() -> dict[str, set[str]]:
    """Row -> what the marks in the tests say of where it stands."""
    found = defaultdict(set)
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "case":
                for row in node.args:
                    assert isinstance(row, ast.Constant) and isinstance(row.value, str), f"{path}:{node.lineno}"
                    assert re.match(r"[A-Z]\d\d( \S|$)", row.value), f"{path}:{node.lineno}: {row.value!r}"
                    found[row.value[:3]].add(row.value[4:])
    return found


def logged() -> dict[str, str]:
    """Row -> its line in docs/log.md, `- G01 (where it stands): why`."""
    section = (
        (ROOT / "docs" / "log.md").read_text(encoding="utf-8").partition(f"## {HEADING}\n")[2].partition("\n## ")[0]
    )
    found = re.findall(r"^- ([A-Z]\d\d) \((\S[^)]*)\): \S", section, re.M)
    assert len(found) == section.count("\n- ") + section.startswith("- "), "a line that is no row"
    return dict(found)


def test_every_row_is_tested_or_cannot_occur():
    rows, here = collected(), set(marked()) | set(logged())
    assert len(rows) > 50, "the tables were not understood"
    assert sorted(rows - here) == [], "neither tested nor in docs/log.md"
    assert sorted(here - rows) == [], "no such row"


def test_every_row_says_once_where_its_report_stands():
    log = logged()
    silent = [row for row, sources in marked().items() if not any(sources) and row not in log]
    assert silent == []
