"""All graphs of one model's steps: of single tokens, of drafts that are checked, of short prompts, and of prompts with
streams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from cortex.neuron.engine.execution.graphs import (
    DRAFT_SIZES,
    MAX_NATIVE_ROWS,
    Capture,
    CaptureCosts,
    CudaCapture,
    GraphSizes,
    SizedGraphs,
    StepGraphs,
    max_captured_rows,
    native_capture,
)
from cortex.neuron.engine.execution.inputs import StepInputs
from cortex.neuron.engine.execution.prompt_graphs import PromptGraphs, mixed_sizes, prompt_sizes, stream_sizes
from cortex.neuron.engine.memory.plan import max_graph_tokens
from cortex.neuron.engine.scheduling.step_plan import StepPlan
from cortex.neuron.kernels.device_properties import properties_of
from cortex.neuron.kernels.jit import has_kernels
from cortex.neuron.models.decoder import Decoder


def default_capture(model: Decoder, *, is_batch_invariant: bool) -> Capture | None:
    """How the steps of a model are captured. Those of a stage are not: its messages are sent between its layers and its
    draw. Nor are divided or batch-invariant steps on a CPU, or those of another library's modules: their messages,
    single rows and modules are no operations in C."""
    architecture = model.architecture
    if architecture.stage is not None:
        return None
    is_native = architecture.backend == "native"
    if model.parameters.device.type == "cuda":
        return CudaCapture(may_fail=architecture.is_divided or not is_native)
    return native_capture if is_native and not architecture.is_divided and not is_batch_invariant else None


class ModelGraphs:
    """Belongs to the engine thread."""

    def __init__(
        self,
        model: Decoder,
        page_tables: Sequence[Tensor],
        last_tokens: Tensor,
        capture: Capture | None,
        *,
        context_tokens: int,
        step_tokens: int,
        block_tokens: int | None = None,
        checks_drafts: bool = False,
        graph_tokens: int | None = None,
    ) -> None:
        """`page_tables` and `last_tokens`: of the rows, the last being the padding row. `block_tokens`: of a
        batch-invariant step. `checks_drafts`: whether steps check draft tokens. `graph_tokens`: the most tokens of a
        captured prompt step, the same on all ranks; None for the best number on this device."""
        self.steps: StepGraphs | None = None
        self.drafts: StepGraphs | None = None
        self.prompts: PromptGraphs | None = None
        self.mixed: tuple[PromptGraphs, ...] = ()
        """Graphs of prompts and streams, the fewest streams first."""
        self.mixed_sizes: dict[int, tuple[int, ...]] = {}
        """Their numbers of prompt tokens, by the number of streams."""
        group, config, max_rows = model.parameters.group, model.config, len(last_tokens) - 1
        row_elements, max_bytes = max(config.hidden, -(-config.vocab // group.shard.size)), group.max_captured_bytes
        graph_rows = max_captured_rows(max_rows, row_elements, max_bytes)
        if capture is None or graph_rows == 0:
            return
        is_native, arguments = capture is native_capture, (model, page_tables, last_tokens)
        sizes = GraphSizes(graph_rows)
        if block_tokens is not None:
            sizes = GraphSizes(block_tokens, sizes=())
        elif is_native:
            sizes = GraphSizes(min(graph_rows, MAX_NATIVE_ROWS), sizes=())
        shared = (context_tokens, capture)
        self.steps = StepGraphs(*arguments, sizes, *shared, is_batch_invariant=block_tokens is not None)
        if block_tokens is not None:
            return
        if checks_drafts:
            sizes = GraphSizes(max_captured_rows(DRAFT_SIZES[-1], row_elements, max_bytes), DRAFT_SIZES)
            if is_native:
                sizes = GraphSizes(MAX_NATIVE_ROWS, sizes=())
            self.drafts = StepGraphs(*arguments, sizes, *shared, checks_drafts=True)
        if graph_tokens is None:
            graph_tokens = max_graph_tokens(properties_of(last_tokens.device).total_bytes)
        most = max_captured_rows(graph_tokens, config.hidden, max_bytes)
        prompts = prompt_sizes(min(step_tokens, context_tokens), most) if has_kernels(last_tokens) else ()
        if prompts:
            self.prompts = PromptGraphs(*arguments, prompts, capture)
            self.mixed_sizes[0] = prompts
        for streams in stream_sizes(max_rows) if prompts else ():
            mixed = [size for size in mixed_sizes(streams) if size <= prompts[-1] and streams + size <= most]
            if mixed:
                both = PromptGraphs(*arguments, mixed, capture, num_streams=streams, context_tokens=context_tokens)
                self.mixed = (*self.mixed, both)
                self.mixed_sizes[streams] = tuple(mixed)

    def taking(self, plan: StepPlan, inputs: StepInputs) -> PromptGraphs | None:
        """The graphs that compute a step of prompts, or of prompts and streams; None if there are none."""
        every = (*(() if self.prompts is None else (self.prompts,)), *self.mixed)
        return next((graphs for graphs in every if graphs.take(plan, inputs)), None)

    def next_among(self, others: Iterable[SizedGraphs]) -> SizedGraphs | None:
        """The graphs to capture next, of these and `others`: the first ones of prompts and of single tokens, then the
        smallest. Steps that check drafts are for small batches."""
        if self.lacking_first:
            return self.lacking_first[0]
        missing = [
            (graphs.smallest_missing, graphs)
            for graphs in (self.steps, self.drafts, self.prompts, *self.mixed, *others)
            if graphs is not None and graphs.smallest_missing is not None
        ]
        return min(missing, key=lambda pair: pair[0], default=(0, None))[1]

    @property
    def costs(self) -> CaptureCosts:
        made = (each.costs for each in (self.steps, self.drafts, self.prompts, *self.mixed) if each is not None)
        return sum(made, CaptureCosts())

    @property
    def lacking_first(self) -> list[SizedGraphs]:
        """Those graphs for a short prompt and its response that have no captured size yet."""
        first = (self.steps, self.prompts)
        return [each for each in first if each is not None and not each.max_rows and each.smallest_missing is not None]
