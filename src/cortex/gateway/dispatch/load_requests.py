"""What the catalogue says about a model, as a request to a node."""

from __future__ import annotations

from cortex.fleet.catalogue import ModelSpec
from cortex.wire.node.orders import LoadRequest


def load_request(spec: ModelSpec) -> LoadRequest:
    """A request to load the model with its options; the placement adds devices and limits."""
    return LoadRequest(
        model_id=spec.id,
        source=spec.source,
        harness=spec.harness,
        quant=spec.quant,
        tensor_parallel=1 if spec.pipeline_parallel > 1 else spec.min_devices,
        pipeline_parallel=spec.pipeline_parallel,
        context_tokens=spec.context,
        control_tokens_in_messages=spec.control_tokens_in_messages,
        kv_dtype=spec.kv_dtype,
        sampling=spec.sampling,
        deterministic=spec.deterministic,
        speculation=spec.speculation,
        vision=spec.vision,
    )
