import pytest

from cortex.neuron.worker.process import ProgressWatch, WorkerTimeouts
from cortex.neuron.worker.protocol import Activity

TIMEOUTS = WorkerTimeouts(start_s=50.0, step_s=10.0, load_s=100.0, unload_s=20.0)


def test_reports_without_progress_do_not_restart_the_clock() -> None:
    watch = ProgressWatch.begin(0.0).reported("step", 5, 1.0)
    for second in range(2, 11):
        watch = watch.reported("step", 5, float(second))
        assert watch.verdict(float(second), TIMEOUTS) is None
    assert "no progress in 'step' for 10 s" in (watch.reported("step", 5, 11.0).verdict(11.0, TIMEOUTS) or "")


def test_progress_restarts_the_clock() -> None:
    watch = ProgressWatch.begin(0.0).reported("step", 5, 1.0).reported("step", 6, 10.0)
    assert watch.verdict(19.0, TIMEOUTS) is None


def test_worker_without_pending_work_is_not_stuck() -> None:
    watch = ProgressWatch.begin(0.0).reported("idle", 5, 1.0).restarted(500.0)
    assert watch.verdict(509.0, TIMEOUTS) is None


def test_worker_that_says_it_is_in_a_step_has_work_whether_or_not_a_request_waits() -> None:
    """It prepares itself, or follows the leader of a divided model."""
    watch = ProgressWatch.begin(0.0)
    assert [watch.reported(activity, 5, 1.0).is_in_step for activity in ("step", "idle", "load")] == [
        True,
        False,
        False,
    ]


def test_time_in_which_the_watchdog_did_not_run_does_not_count() -> None:
    """A machine that was stopped, or that had no core for the daemon, had none for the worker either."""
    watch = ProgressWatch.begin(0.0).reported("step", 5, 1.0).excusing(500.0)
    assert watch.verdict(510.0, TIMEOUTS) is None
    assert "no progress in 'step' for 10 s" in (watch.verdict(511.0, TIMEOUTS) or "")


def test_load_has_its_own_timeout() -> None:
    watch = ProgressWatch.begin(0.0).reported("load", 5, 0.0)
    assert watch.verdict(99.0, TIMEOUTS) is None
    assert watch.verdict(100.0, TIMEOUTS) is not None


@pytest.mark.parametrize("activity", ["start", "load", "unload"])
def test_worker_that_has_replied_is_measured_by_its_steps_whatever_it_reported_last(activity: Activity) -> None:
    watch = ProgressWatch.begin(0.0).reported(activity, 5, 0.0).restarted(19.0).reported(activity, 5, 19.0)
    assert watch.verdict(28.0, TIMEOUTS, is_called=False) is None
    assert "no progress in 'step' for 10 s" in (watch.verdict(29.0, TIMEOUTS, is_called=False) or "")


def test_reply_is_progress_of_a_load_beside_it() -> None:
    watch = ProgressWatch.begin(0.0).reported("load", 5, 0.0).restarted(50.0)
    assert watch.verdict(149.0, TIMEOUTS) is None
    assert watch.verdict(150.0, TIMEOUTS) is not None


def test_worker_that_never_reports_is_measured_from_its_start() -> None:
    assert ProgressWatch.begin(0.0).verdict(49.0, TIMEOUTS) is None
    assert ProgressWatch.begin(0.0).verdict(50.0, TIMEOUTS) is not None
