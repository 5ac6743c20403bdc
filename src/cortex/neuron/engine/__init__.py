"""Continuous batching over paged KV. Runs on a bare host with torch alone.

The contract the device worker relies on (`engine.Engine`, every method on the engine thread only):

    Engine.load(spec, device, progress, cancelled) -> Engine
        progress(stage, done_bytes, total_bytes) is called often; cancelled() true raises LoadCancelled.
        Raises LoadError (bad files, unsupported architecture, does not fit) with a message for the user,
        and leaves nothing on the device when it raises. The worker steps its other engines inside progress():
        call it outside of torch modes that would reach them (default dtype, default device).
    engine.info: EngineInfo
    engine.submit(request)       raises RequestError when it can never be served
    engine.cancel(request_id)    unknown ids are ignored; a final StepOutput("cancelled") follows for known ones
    engine.has_work: bool
    engine.step() -> list[StepOutput]
        When it raises (out of memory, a bug) every request is still in the engine and will be computed as if the
        step had not been: the worker cancels the ones to blame and steps on. StepBlamed names the one to blame.
    engine.isolate() -> bool
        After a step raised for an unknown reason: its requests are computed one at a time, so that a later StepBlamed
        names the one at fault. False where that is not possible; raises what a self-test raises.
    engine.prepare() -> bool
        One more thing that later steps may want is built, within a second or so as a rule; false: nothing is left.
        To be called when no engine has work. Steps run without it, too, only slower.
    engine.stats() -> EngineStats
    engine.sleep() -> int        device memory given back, weights in so many bytes of host memory; only when idle.
                                 The prefix cache is gone afterwards. Raises SleepError, and then is awake as before.
    engine.wake(progress)        back to answering, after a self-test. Whatever it raises, it sleeps as before; but
                                 after a DamagedError it must be closed.
    engine.close()               frees everything; the object is dead afterwards
"""
