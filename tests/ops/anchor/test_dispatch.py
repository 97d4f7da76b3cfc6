"""Which backend runs."""

from __future__ import annotations

import pytest

from hf_memeff.ops.anchor import dispatch
from ops.anchor._inputs import INF, inputs, settings, whole


def test_the_config_names_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    for name, run in list(dispatch.BACKENDS.items()):
        monkeypatch.setitem(
            dispatch.BACKENDS, name, lambda *a, run=run, name=name, **k: (ran.append(name), run(*a, **k))[1]
        )
    q, k, v = inputs(queries=50)
    for backend in (None, "reference", "torch"):
        config = settings(backend=backend)
        dispatch.anchor_attention(q, k, v, segments=whole(q, k), thetas=[1.0] * 2, config=config, scale=0.25)
    assert ran == ["torch", "reference", "torch"]


def test_a_backend_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(ValueError, match="'nothing', expected one of 'torch', 'reference', 'triton'"):
        dispatch.backend_name(settings(backend="nothing"))


def test_kept_sets_only_where_asked_for() -> None:
    q, k, v = inputs(queries=100)
    for backend in ("torch", "reference"):
        arguments = {"segments": whole(q, k), "thetas": [1.0] * 2, "config": settings(backend=backend), "scale": 0.25}
        assert not dispatch.anchor_attention(q, k, v, **arguments).kept_keys
        assert dispatch.anchor_attention(q, k, v, **arguments, return_kept=True).kept_keys


@pytest.mark.parametrize(
    ("thetas", "changes", "expected"),
    [
        ([INF, INF], {"dense_above": "auto"}, True),
        ([INF, INF], {"dense_above": 0.5}, True),
        ([INF, INF], {"dense_above": None}, False),
        ([INF, INF], {"dense_above": 1.0}, False),
        ([INF, 12.0], {"dense_above": "auto"}, False),
        ([INF, INF], {"dense_above": "auto", "max_keep": 5}, False),
    ],
)
def test_thresholds_may_say_beforehand_that_all_is_dense(thetas: list, changes: dict, expected: bool) -> None:
    assert dispatch.every_key_kept(thetas, settings(**changes)) == expected
