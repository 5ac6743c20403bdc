from hypothesis import given
from hypothesis import strategies as st

from cortex.neuron.node.loading.progress import STAGES, LoadProgressTracker

reports = st.lists(
    st.tuples(st.sampled_from([*STAGES, "unknown"]), st.integers(0, 100), st.integers(0, 100)), max_size=30
)


@given(reports)
def test_progress_never_goes_backwards(history: list[tuple[str, int, int]]) -> None:
    progress = LoadProgressTracker.begin(0.0)
    for now_s, (stage, done_bytes, total_bytes) in enumerate(history):
        later = progress.advanced(stage, done_bytes, total_bytes, float(now_s))
        assert STAGES.index(later.stage) >= STAGES.index(progress.stage)
        if later.stage == progress.stage:
            assert later.done_bytes >= progress.done_bytes
        progress = later


def test_a_stage_that_older_gateways_do_not_know_is_reported_as_a_part_of_one_that_they_do() -> None:
    placing = LoadProgressTracker.begin(0.0).advanced("place", 1, 2, 1.0)
    compiling = placing.advanced("compile", 0, 0, 2.0)
    reported = [each.snapshot() for each in (placing, compiling, compiling.advanced("warm", 0, 0, 3.0))]
    assert [(each.stage, each.substage) for each in reported] == [
        ("place", None),
        ("place", "compile"),
        ("warm", None),
    ]
    assert [each.finest_stage for each in reported] == ["place", "compile", "warm"]
    assert {LoadProgressTracker(stage, 0.0, 0.0).snapshot().stage for stage in STAGES} == {
        "resolve",
        "download",
        "read",
        "place",
        "warm",
    }


def test_estimates_the_time_left_from_the_rate_of_the_stage() -> None:
    progress = LoadProgressTracker.begin(0.0).advanced("download", 0, 1000, 10.0)
    assert progress.snapshot().eta_s is None
    assert progress.advanced("download", 250, 1000, 15.0).snapshot().eta_s == 15.0
    assert progress.advanced("download", 1000, 1000, 20.0).snapshot().eta_s == 0.0
