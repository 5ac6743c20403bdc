"""A caller that merges what has changed knows what the node reports."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.gateway.dispatch.nodes.poller import merged
from cortex.neuron.api.routes.control import ReportRevisions
from cortex.wire.node.protocol import Health, ModelState, ModelStatus


def health(*models: ModelStatus) -> Health:
    return Health(status="ok", uptime_s=1.0, devices=(), models=models)


def cold(name: str, **facts: object) -> ModelStatus:
    return ModelStatus(id=name, state=ModelState.COLD, **facts)  # type: ignore[arg-type]


def test_only_what_changed_is_sent() -> None:
    revisions = ReportRevisions()
    rests = [cold(f"m{number}") for number in range(200)]
    whole = revisions.report(health(*rests), None)
    assert (len(whole.models), whole.since) == (200, None)
    same = revisions.report(health(*rests), whole.revision)
    assert (same.models, same.since, same.revision) == ((), whole.revision, whole.revision)
    loading = ModelStatus(id="m7", state=ModelState.LOADING)
    changed = revisions.report(health(*rests[:7], loading, *rests[8:]), same.revision)
    assert (changed.models, changed.gone) == ((loading,), ())
    fewer = revisions.report(health(*rests[8:]), changed.revision)
    assert (fewer.models, set(fewer.gone)) == ((), {f"m{number}" for number in range(8)})
    assert len(revisions.report(health(*rests[8:]), whole.revision).gone) == 8  # another caller is further behind


@pytest.mark.parametrize("since", ["", "x", "0000.1", "{epoch}.99", "{epoch}.-1", "{epoch}.1.2", "{epoch}.٣"])
def test_everything_is_sent_where_the_revision_is_not_known(since: str) -> None:
    revisions = ReportRevisions()
    epoch = revisions.report(health(cold("m")), None).revision.partition(".")[0]
    found = revisions.report(health(cold("m")), since.format(epoch=epoch))
    assert (len(found.models), found.since) == (1, None)


def test_another_process_knows_no_revision_of_this_one() -> None:
    revision = ReportRevisions().report(health(cold("m")), None).revision
    assert ReportRevisions().report(health(cold("m")), revision).since is None


@given(st.integers(0, 2**32))
def test_callers_that_merge_changes_know_all_models(seed: int) -> None:
    random = Random(seed)
    revisions = ReportRevisions(max_gone=4)
    models: dict[str, ModelStatus] = {}
    known: list[Health | None] = [None, None]
    for _ in range(40):
        name = f"m{random.randrange(6)}"
        if random.random() < 0.4:
            models.pop(name, None)
        else:
            models[name] = cold(name, disk_bytes=random.randrange(3))
        caller = random.randrange(2)
        last = known[caller]
        sent = revisions.report(health(*models.values()), None if last is None else last.revision)
        now = merged(last, sent)
        assert now is not None
        assert {status.id: status for status in now.models} == models
        known[caller] = now


def test_a_change_since_another_report_is_not_merged() -> None:
    assert merged(None, Health(status="ok", uptime_s=1.0, devices=(), models=(), since="a.1")) is None
