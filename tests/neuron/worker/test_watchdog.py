from cortex.neuron.worker.watchdog import Patience, ProgressWatch

PATIENCE = Patience(start_s=50.0, step_s=10.0, load_s=100.0, unload_s=20.0)


def test_reports_without_progress_do_not_help():
    watch = ProgressWatch.begin(0.0).reported("step", 5, 1.0)
    for second in range(2, 11):
        watch = watch.reported("step", 5, float(second))
        assert watch.verdict(float(second), PATIENCE) is None
    assert "no progress in 'step' for 10 s" in watch.reported("step", 5, 11.0).verdict(11.0, PATIENCE)


def test_progress_restarts_the_clock():
    watch = ProgressWatch.begin(0.0).reported("step", 5, 1.0).reported("step", 6, 10.0)
    assert watch.verdict(19.0, PATIENCE) is None


def test_silence_without_pending_work_is_fine():
    watch = ProgressWatch.begin(0.0).reported("idle", 5, 1.0).at_rest(500.0)
    assert watch.verdict(509.0, PATIENCE) is None


def test_a_load_has_its_own_patience():
    watch = ProgressWatch.begin(0.0).reported("load", 5, 0.0)
    assert watch.verdict(99.0, PATIENCE) is None
    assert watch.verdict(100.0, PATIENCE) is not None


def test_a_worker_that_never_reports_is_judged_from_its_start():
    assert ProgressWatch.begin(0.0).verdict(49.0, PATIENCE) is None
    assert ProgressWatch.begin(0.0).verdict(50.0, PATIENCE) is not None
