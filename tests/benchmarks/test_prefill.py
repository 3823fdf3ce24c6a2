"""The profile of prefill, as far as it needs no GPU."""

from __future__ import annotations

from types import SimpleNamespace

from benchmarks.rollout import kind_of, prefill_rows


def event(name: str, start: float, end: float) -> SimpleNamespace:
    span = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, device_time=end - start, time_range=span)


def test_kinds_and_idle_time_come_before_kernels() -> None:
    events = [event("forward_kernel", 0, 30), event("_forward_kernel", 40, 50)]
    events += [event("forward_kernel", 60, 100), event("a host's event", 0, 0)]
    rows = prefill_rows(events, forwards=2, kind_of=kind_of)
    assert [(row["kernel of prefill"], row["us_a_forward"]) for row in rows] == [
        ("= attention", 35.0),
        ("= idle", 10.0),
        ("= QK norm, rotary, keys and values to their pages", 5.0),
        ("forward_kernel", 35.0),
        ("_forward_kernel", 5.0),
    ]
    assert rows[0] | {"share": 0.7, "launches": 1.0, "us_each": 35.0} == rows[0]
