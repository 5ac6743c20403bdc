from cortex.neuron.worker.device_claims import DeviceClaims


def test_only_models_that_span_nodes_keep_other_divided_models_off_their_devices() -> None:
    claims = DeviceClaims()
    local, spanning = claims.new("local", (0, 1), spans=False), claims.new("wide", (2,), spans=True)
    assert claims.conflicts(spans=True) == {}
    for claim in (local, spanning, spanning):
        claim.take()
    assert claims.conflicts(spans=False) == {2: "it has a part of wide, which spans nodes"}
    assert set(claims.conflicts(spans=True)) == {0, 1, 2}
    assert claims.conflicts(spans=True)[0].startswith("it has a part of local, and a model that spans nodes")
    for claim in (spanning, spanning, local):
        claim.release()
    assert claims.conflicts(spans=True) == {}
