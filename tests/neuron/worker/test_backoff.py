from cortex.neuron.worker.backoff import BackoffPolicy, FaultHistory

POLICY = BackoffPolicy(first_delay_s=1.0, max_delay_s=3.0, max_streak=5, max_faults=8, window_s=100.0)


def test_the_first_retry_is_immediate_then_delays_double_up_to_the_ceiling_then_it_is_given_up():
    history, delays = FaultHistory(), []
    for now_s in range(6):
        history = history.faulted(float(now_s), POLICY)
        delays.append(history.delay_s(POLICY))
    assert delays == [0.0, 1.0, 2.0, 3.0, 3.0, None]


def test_a_sign_of_life_ends_the_streak():
    history = FaultHistory()
    for now_s in range(4):
        history = history.faulted(float(now_s), POLICY).proved()
    assert history.faulted(5.0, POLICY).delay_s(POLICY) == 0.0


def test_something_that_works_but_keeps_dying_is_given_up_too():
    history = FaultHistory()
    for now_s in range(9):
        history = history.proved().faulted(float(now_s), POLICY)
    assert history.delay_s(POLICY) is None


def test_old_faults_leave_the_window():
    history = FaultHistory()
    for fault in range(50):
        history = history.proved().faulted(fault * 60.0, POLICY)
    assert history.delay_s(POLICY) == 0.0
    assert len(history.times_s) == 2
