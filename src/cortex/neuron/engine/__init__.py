"""Continuous batching over paged KV. Runs on a bare host with torch alone.

The contract the device worker relies on (`engine.Engine`, every method on the engine thread only):

    Engine.load(spec, device, progress, cancelled) -> Engine
        progress(stage, done_bytes, total_bytes) is called often; cancelled() true raises LoadCancelled.
        Raises LoadError (bad files, unsupported architecture, does not fit) with a message for the user,
        and leaves nothing on the device when it raises.
    engine.info: EngineInfo
    engine.submit(request)       raises RequestError when it can never be served
    engine.cancel(request_id)    unknown ids are ignored; a final StepOutput("cancelled") follows for known ones
    engine.has_work: bool
    engine.step() -> list[StepOutput]
    engine.stats() -> EngineStats
    engine.close()               frees everything; the object is dead afterwards
"""
