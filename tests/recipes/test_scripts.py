"""Errors that say what to do end a script in one line; all others keep their traceback."""

from __future__ import annotations

import pytest

from hf_memeff.benchmarks.results import ResultsError
from hf_memeff.benchmarks.sage_text import DataError
from hf_memeff.recipes.card_fields import CardError
from hf_memeff.recipes.errors import RecipeError
from hf_memeff.recipes.model_source import ModelUnavailableError
from hf_memeff.recipes.scripts import one_line_errors


@pytest.mark.parametrize("kind", [RecipeError, CardError, DataError, ResultsError, ModelUnavailableError])
def test_errors_with_advice(kind: type[Exception]) -> None:
    with pytest.raises(SystemExit) as caught, one_line_errors("script"):
        raise kind("got, expected, fix")
    assert caught.value.code == "script: got, expected, fix"


def test_an_interruption(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught, one_line_errors("script"):
        raise KeyboardInterrupt
    assert caught.value.code == 130 and capsys.readouterr().err == "script: interrupted\n"


def test_faults_are_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError), one_line_errors("script"):
        raise ZeroDivisionError
