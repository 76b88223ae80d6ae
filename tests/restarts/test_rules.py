"""Whether a job is started again, after attempts that are written down here."""

import dataclasses

import pytest

from kdist.restarts.attempt import Attempt, End
from kdist.restarts.events import Events, Failure, Kind
from kdist.restarts.progress import Progress
from kdist.restarts.rules import are_new, decide
from kdist.restarts.summary import as_values, blamed, in_words
from kdist.restarts.supervisor import supervise

NO_SCOPE = Events({}, False, (), None)
IN_SCOPE = Events({0: "here", 1: "here"}, False, (), None)
STEPS = Events({0: "here", 1: "here"}, True, (), None)
ENDED = dataclasses.replace(STEPS, has_ended=True)


def attempt(kind=None, saved=0, *, events=STEPS, end=End.FAILED, code=1, backup=True, numbers=(0, 0), fit=1, **more):
    failure = None if kind is None else Failure(kind, f"of the kind {kind.value}", 1, "here", **more)
    resumed, number = numbers
    places = (number, fit * min(saved, 1), 0, saved, resumed)
    progress = Progress(fit, saved + 3, saved, *places, 11.0, 15.0) if backup else None
    return Attempt(end, code, 10.0, 20.0, events, failure, progress)


KILLED = Kind.SIGNAL
WELL = attempt(end=End.WELL, code=0)


@pytest.mark.parametrize("kind", [Kind.SIGNAL, Kind.LOST, Kind.STALL, Kind.EXCEPTION, None])
def test_what_is_started_again(kind):
    assert decide([attempt(kind, 1)], 1).again
    assert decide([attempt(kind)], 1).again  # once without a checkpoint


@pytest.mark.parametrize(
    ("attempts", "why"),
    [
        ([WELL], ""),
        ([attempt(end=End.STOPPED, code=143)], "asked to end"),
        ([attempt(Kind.EXIT, 1)], "chose to exit"),
        ([attempt(Kind.DISAGREEMENT, 1)], "in the same way"),
        ([attempt(Kind.EXCEPTION, 1, comes_again=True)], "in the same way"),
        ([attempt(Kind.SIGNAL, events=NO_SCOPE, backup=False)], "no rank entered"),
        ([attempt(Kind.EXCEPTION, events=IN_SCOPE, backup=False)], "no step was trained"),
        ([attempt(events=IN_SCOPE, backup=False)], "no step was trained"),
        ([attempt(KILLED), attempt(KILLED)], "2 attempts have made no new checkpoint of BackupAndRestore"),
        (
            [attempt(KILLED, backup=False), attempt(KILLED, backup=False)],
            "2 attempts have made no new checkpoint of BackupAndRestore",
        ),
        (
            [attempt(KILLED, 4), attempt(KILLED, 4), attempt(KILLED, 4)],
            "2 attempts have made no new checkpoint of BackupAndRestore",
        ),
        ([attempt(Kind.EXCEPTION, 4), attempt(Kind.EXCEPTION, 4)], "raised twice"),
        ([attempt(KILLED, 4, events=ENDED)], "the script of rank 0 had ended"),
    ],
)
def test_what_is_not(attempts, why):
    decision = decide(attempts, 9)
    assert not decision.again
    assert why in decision.why
    assert bool(why) == bool(decision.why)


def test_a_start_that_fails_after_others_is_no_failed_start():
    assert decide([attempt(KILLED, 2), attempt(KILLED, events=NO_SCOPE, backup=False)], 2).again


def test_a_new_checkpoint_refills_the_count():
    assert decide([attempt(KILLED, 1)], 1).left == 0
    assert "the restart has been used" in decide([attempt(KILLED, 1), attempt(KILLED, 1)], 1).why
    assert decide([attempt(KILLED, 1), attempt(KILLED, 2)], 1).again
    assert decide([attempt(KILLED, 1), attempt(KILLED, 2), attempt(KILLED, 2)], 2).again


def test_a_preemption_does_not_count():
    preempted = [attempt(Kind.PREEMPTION, number, code=75) for number in (1, 2, 2)]
    assert all(decide(preempted[:number], 1).again for number in (1, 2, 3))
    assert decide([*preempted, attempt(KILLED, 2)], 1).again
    assert not decide([*preempted, attempt(KILLED, 2), attempt(KILLED, 2)], 1).again


def test_what_is_saved_again_is_not_new():
    """The second attempt repeats the first's `fit`, whose backups were deleted, and dies in the same place."""
    assert are_new([attempt(KILLED, 3), attempt(KILLED, 2), attempt(KILLED, 3), attempt(KILLED, 4)]) == [
        *(True, False, False, True),
    ]


def test_twice_the_ranks_need_half_the_steps():
    before = attempt(Kind.RESIZE, 400, numbers=(0, 1400), code=75)
    larger = [attempt(KILLED, 210, numbers=(1400, 1410)), attempt(KILLED, 220, numbers=(1410, 1420))]
    assert are_new([before, *larger]) == [True] * 3
    assert decide([before, *larger], 3).left == 2


def test_a_script_that_leaves_out_finished_fits_makes_progress():
    attempts = [attempt(KILLED, 5, fit=3, numbers=(0, 50)), attempt(KILLED, 9, numbers=(50, 90))]
    assert are_new(attempts) == [True, True]
    # The fold that follows begins anew, and goes on afterwards.
    attempts += [attempt(KILLED, 4, numbers=(0, 140)), attempt(KILLED, 6, numbers=(140, 160))]
    assert are_new(attempts) == [True, True, False, True]
    assert decide(attempts[:3], 2).again
    assert decide(attempts, 1).again


def test_what_goes_on_and_saves_nothing_makes_no_progress():
    """So does one that goes on from an older checkpoint, since the newest was lost."""
    first = attempt(KILLED, 400, numbers=(0, 1400))
    assert are_new([first, attempt(KILLED, numbers=(0, 0)), attempt(KILLED, 300, numbers=(1200, 1300))]) == [
        *(True, False, False),
    ]
    assert not decide([first, attempt(KILLED), attempt(KILLED)], 9).again


def supervised(attempts, restarts=1, stopped=False):
    said, kept = [], []
    made, why = supervise(
        lambda so_far: attempts[len(so_far)],
        restarts,
        say=said.append,
        keep=lambda all_of_them, why: kept.append((len(all_of_them), why)),
        is_stopped=lambda: stopped,
    )
    return made, why, said, kept


def test_the_supervisor_says_what_it_does():
    made, why, said, kept = supervised([attempt(KILLED, 1), attempt(Kind.PREEMPTION, 2), WELL, None])
    assert len(made) == 3
    assert why == ""
    assert kept == [(1, ""), (2, ""), (3, "")]
    assert len(said) == 2
    assert "rank 1 on host here of the kind signal; the job is started again, attempt 2" in said[0]
    assert "not counted" in said[1]


def test_it_warns_once_without_a_backup():
    _, why, said, _ = supervised([attempt(KILLED, backup=False)] * 2, restarts=5)
    assert "no new checkpoint" in why
    assert [line for line in said if "no backup was made" in line] == said[:1]


def test_a_start_that_fails_after_a_backup_has_one():
    _, _, said, _ = supervised([attempt(KILLED, 1), attempt(KILLED, events=NO_SCOPE, backup=False), WELL], restarts=5)
    assert not [line for line in said if "no backup was made" in line]
    words = in_words([attempt(KILLED, 1), attempt(events=NO_SCOPE, backup=False), WELL], "")
    assert "attempt 2: it ended with code 1, for an unknown reason; lost 0 steps" in words
    # A rank may die in the scope, before `fit`: nobody knows yet whether there is a backup.
    _, _, said, _ = supervised([attempt(KILLED, events=IN_SCOPE, backup=False), WELL])
    assert not [line for line in said if "no backup was made" in line]
    assert "lost 0 steps" in in_words([attempt(KILLED, events=IN_SCOPE, backup=False), WELL], "")


def test_a_signal_between_two_attempts_ends_it():
    made, why, said, _ = supervised([attempt(KILLED, 1), WELL], stopped=True)
    assert len(made) == 1
    assert "asked to end" in why
    assert said == []


def test_who_is_blamed():
    assert blamed(attempt(Kind.STALL)) == "rank 1 on host here made no progress for stall_timeout"
    assert blamed(attempt(KILLED)) == "rank 1 on host here of the kind signal"
    assert blamed(attempt()) == "it ended with code 1, for an unknown reason"
    host = Attempt(End.FAILED, 1, 0.0, 1.0, STEPS, Failure(Kind.LOST, "host beta was lost", None, "beta"))
    assert blamed(host) == "host beta was lost"


def test_the_summary():
    attempts = [attempt(KILLED, 2), attempt(Kind.EXCEPTION, 4), attempt(Kind.EXIT, backup=False)]
    words = in_words(attempts, "the script chose to exit").splitlines()
    assert words[0] == "3 attempts, exit code 1; not started again: the script chose to exit"
    assert "attempt 1: rank 1 on host here of the kind signal; lost 3 steps and 5 s" in words[1]
    assert "lost all steps, without a backup, and" in words[3]
    values = as_values(attempts, "the script chose to exit", 1)
    assert [each["cause"] for each in values["attempts"]] == ["signal", "exception", "exit"]
    assert [each["new_checkpoint"] for each in values["attempts"]] == [True, True, False]
    assert [each["steps_lost"] for each in values["attempts"]] == [3, 3, None]
    assert values["steps_lost"] is None
    assert values["exit_code"] == 1
    assert in_words([WELL], "") == ""
