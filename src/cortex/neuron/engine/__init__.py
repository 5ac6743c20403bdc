"""Continuous batching over paged KV. Runs on a bare host with torch alone.

The contract that the device worker relies on (`engine.Engine`, every method on the engine thread only):

    Engine.load(spec, device, progress, cancelled) -> Engine
        Calls progress(stage, done_bytes, total_bytes) often; raises LoadCancelled when cancelled() returns true.
        Raises LoadError (bad files, unsupported architecture, does not fit) with a message for the user. When it
        raises, it leaves nothing on the device. The worker steps its other engines inside progress(): call it outside
        of torch modes that would affect them (default dtype, default device).
    engine.info: EngineInfo
    engine.submit(request)       raises RequestError if the request can never be served
    engine.cancel(request_id)    ignores unknown ids; for known ones a last StepOutput("cancelled") follows
    engine.has_work: bool
    engine.shares_device: bool   set before a step: other engines of the device had work just now
    engine.step() -> list[StepOutput]
        When it raises (out of memory, a bug), every request is still in the engine and will be computed as if the
        step had not run: the worker cancels the requests at fault and continues. FaultyRequest names the one at fault.
    engine.isolate() -> bool
        After a step that raised for an unknown reason: computes its requests one at a time, so that a later
        FaultyRequest names the one at fault. False if that is not possible; raises what a self-test raises.
    engine.prepare() -> bool
        Builds one more thing that later steps may use, usually within a second; false if nothing is left to build.
        Call it when no engine has work. Steps also run without it, only slower.
    engine.stats() -> EngineStats
    engine.sleep() -> int        frees device memory and keeps the weights in host memory, whose bytes it returns; only
                                 without work. The prefix cache is lost. Raises SleepError, and then stays awake.
    engine.wake(progress)        makes a sleeping model ready again, after a self-test. If it raises, the model stays
                                 asleep; after a DamagedError it must be closed.
    engine.close()               frees everything; the object is unusable afterwards
"""
