"""How long a run will take is told once, from steps that were timed, where it is worth a line."""

import pytest

from vardass.cli.terminal import tell_time, time_text


@pytest.mark.parametrize(
    ("first", "step", "steps", "left"),
    [
        (30.0, 0.5, 600, 297.5),  # told after two seconds of steps; compiling before the first one is not counted
        (1.0, 9.0, 100, 9.0 * 98),  # after one step where that takes longer
        (30.0, 0.01, 1000, None),  # done in ten seconds
    ],
)
def test_time_is_told_once_before_much_is_spent(first, step, steps, left):
    now, told, shown = [0.0], [], []
    report = tell_time(lambda share, message: shown.append(share), told.append, clock=lambda: now[0])
    report(0.0, "embeddings")
    now[0] = first
    for done in range(1, steps + 1):
        report(done / steps, "step")
        now[0] += step
    assert told == ([] if left is None else [pytest.approx(left)])
    assert len(shown) == steps + 1


@pytest.mark.parametrize(
    ("seconds", "text"), [(45, "45 s"), (70, "70 s"), (200, "3 min"), (5000, "83 min"), (9000, "2.5 h")]
)
def test_durations(seconds, text):
    assert time_text(seconds) == text


def test_a_long_first_pass_says_how_far_it_is_once(capsys):
    now = [0.0]
    report = tell_time(None, lambda seconds: None, clock=lambda: now[0])
    for done in range(6):
        report(0.0, f"features of {done},000 of 6,000 samples")
        now[0] += 4.0
    report(0.5, "step")
    assert capsys.readouterr().err == "before the first step: features of 3,000 of 6,000 samples\n"
