from cortex.neuron.worker.backoff import BackoffPolicy, FaultHistory

POLICY = BackoffPolicy(first_delay_s=1.0, max_delay_s=3.0, max_streak=5, max_faults=8, window_s=100.0)


def test_first_retry_is_immediate_then_delays_double_up_to_the_maximum_then_none() -> None:
    history, delays = FaultHistory(), []
    for now_s in range(6):
        history = history.faulted(float(now_s), POLICY)
        delays.append(history.delay_s(POLICY))
    assert delays == [0.0, 1.0, 2.0, 3.0, 3.0, None]


def test_useful_work_ends_the_streak() -> None:
    history = FaultHistory()
    for now_s in range(4):
        history = history.faulted(float(now_s), POLICY).proved()
    assert history.faulted(5.0, POLICY).delay_s(POLICY) == 0.0


def test_gives_up_after_too_many_faults_even_with_useful_work() -> None:
    history = FaultHistory()
    for now_s in range(9):
        history = history.proved().faulted(float(now_s), POLICY)
    assert history.delay_s(POLICY) is None


def test_forgets_faults_outside_the_window() -> None:
    history = FaultHistory()
    for fault in range(50):
        history = history.proved().faulted(fault * 60.0, POLICY)
    assert history.delay_s(POLICY) == 0.0
    assert len(history.times_s) == 2
