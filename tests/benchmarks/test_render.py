"""Marked blocks are filled, and a mark that cannot be is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_memeff.benchmarks.render import RenderError, blocks, fill, render_file
from hf_memeff.benchmarks.results import write_results
from hf_memeff.benchmarks.tables import NOT_MEASURED


def mark(name: str, inside: str) -> str:
    return f"<!-- memeff:begin {name} -->{inside}<!-- memeff:end -->"


def test_blocks_on_lines_of_their_own_and_within_a_line() -> None:
    text = f"a\n{mark('one', chr(10) + 'old' + chr(10))}\nb {mark('two', 'old')} c {mark('two', '')}.\n"
    filled = fill(text, {"one": "1\n1", "two": "2"})
    assert (
        filled
        == f"a\n{mark('one', chr(10) + '1' + chr(10) + '1' + chr(10))}\nb {mark('two', '2')} c {mark('two', '2')}.\n"
    )
    assert fill(filled, {"one": "1\n1", "two": "2"}) == filled


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (mark("other", ""), "Got block 'other', expected one of one"),
        ("nothing", "Got no block 'one', expected all of one"),
        ("<!-- memeff:begin one -->", "Got a begin or end mark alone"),
        (mark("one", "") + "<!-- memeff:end -->", "Got a begin or end mark alone"),
        ("<!-- memeff:begin one -->" + mark("one", ""), "Got block 'one' without an end of its own"),
        (mark("one two", ""), "Got a begin or end mark alone"),
    ],
)
def test_marks_that_cannot_be_filled(text: str, message: str) -> None:
    with pytest.raises(RenderError, match=message):
        fill(text, {"one": "1"})


def test_a_block_with_nothing_measured_needs_no_mark() -> None:
    assert fill("nothing", {"one": NOT_MEASURED}) == "nothing"
    assert fill(mark("one", ""), {"one": NOT_MEASURED}) == mark("one", NOT_MEASURED)


def test_sage_s_results_have_blocks(learning, steps, cosines, tmp_path: Path) -> None:
    assert {text for name, text in blocks(tmp_path).items() if name.startswith("sage-")} == {NOT_MEASURED}
    write_results(learning, tmp_path / "sage_learning.json")
    write_results(steps, tmp_path / "sage_steps.json")
    write_results(cosines, tmp_path / "sage_cosine.json")
    found = {name: text for name, text in blocks(tmp_path).items() if name.startswith("sage-")}
    assert {name for name, text in found.items() if text == NOT_MEASURED} == {
        "sage-learning-boolq",
        "sage-learning-boolq-note",
        "sage-learning-boolq-rates",
        "sage-learning-gsm8k-rates",
    }
    readme = tmp_path / "README.md"
    readme.write_text("".join(f"{mark(name, chr(10))}\n" for name in blocks(tmp_path)))
    assert render_file(readme, tmp_path)
    assert "| SAGE, attention, 0.25 | 80.0 | 40.0 | 0.75 | 0.50 |  |" in readme.read_text()
    readme.write_text(readme.read_text().replace("memeff:begin sage-steps ", "memeff:begin methods "))
    with pytest.raises(RenderError, match="Got no block 'sage-steps'"):
        render_file(readme, tmp_path)


def test_a_file_is_rendered_once_and_check_only_looks(sweep, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    before = "".join(f"{mark(name, '')}\n" for name in blocks(tmp_path))
    readme.write_text(before)
    write_results(sweep, tmp_path / "mesp.json")
    assert render_file(readme, tmp_path, write=False)
    assert readme.read_text() == before
    assert render_file(readme, tmp_path)
    assert "| MeSP | 5.0 | 10.0 |" in readme.read_text()
    assert not render_file(readme, tmp_path)
