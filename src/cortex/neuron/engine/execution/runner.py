"""Runs planned steps on the device: page tables, input tensors, the forward pass, the draw.

A row's page table and latest token stay on the device while a sequence has the row, so a decode step sends only
positions. `launch` does not wait for the device; `Launched.read` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cortex.neuron.engine.errors import FaultyRequest
from cortex.neuron.engine.execution import batch_invariant
from cortex.neuron.engine.execution.draw_graphs import DrawGraphs
from cortex.neuron.engine.execution.graphs import (
    MAX_NATIVE_ROWS,
    Capture,
    CaptureCosts,
    CudaCapture,
    SizedGraphs,
    StepGraphs,
)
from cortex.neuron.engine.execution.inputs import PictureInputs, StepInputs
from cortex.neuron.engine.execution.model_graphs import ModelGraphs, default_capture
from cortex.neuron.engine.execution.page_tables import PageTables
from cortex.neuron.engine.execution.picture_encoder import PictureEncoder
from cortex.neuron.engine.execution.prompt_scores import PromptScores, score_prompts
from cortex.neuron.engine.execution.proposals import Proposals
from cortex.neuron.engine.execution.results import Launched
from cortex.neuron.engine.execution.threads import StepThreads
from cortex.neuron.engine.memory.sequences import SequenceMemory
from cortex.neuron.engine.sampling.sampler import Draw, Drawn, GrammarMask, Sampler, draw_lines
from cortex.neuron.engine.scheduling.step_plan import StepPlan
from cortex.neuron.engine.uploads import upload
from cortex.neuron.kernels.batch import Batch, PictureVectors, PrefillRow, prefill_tiles
from cortex.neuron.kernels.sampling.rows import Draws
from cortex.neuron.models.decoder import Decoder
from cortex.neuron.models.proposer import Proposer
from cortex.neuron.models.towers.config import PASS_PATCHES

NewMask = Callable[[], GrammarMask | None]
"""Returns the tokens that a step may draw; called while the device computes the step."""


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """The configuration of a runner's steps."""

    max_rows: int
    context_tokens: int
    step_tokens: int
    """Most tokens of one step."""
    block_tokens: int | None = None
    """Size of the blocks in which tokens are computed, so that results do not depend on each other (`batch_invariant`);
    None: all tokens of a step together."""
    checks_drafts: bool = False
    """Whether steps that check draft tokens are also captured."""
    pass_patches: int = PASS_PATCHES["cpu"]
    """Patches of pictures that the tower computes at once."""
    graph_tokens: int | None = None
    """See `ModelGraphs`."""


class Runner:
    """Owns the rows' state on the device. Belongs to the engine thread."""

    def __init__(
        self,
        model: Decoder,
        memory: SequenceMemory,
        config: RunnerConfig,
        *,
        proposer: Proposer | None = None,
        capture: Capture | None = None,
    ) -> None:
        """`memory`: of pages, and of states, where a row's number is its slot. `proposer`: what drafts tokens for later
        steps. `capture`: captures single-token steps as graphs; None: as `default_capture` says."""
        max_rows, context_tokens, block_tokens = config.max_rows, config.context_tokens, config.block_tokens
        page_tokens = memory.page_tokens
        self.model = model
        self._memory = memory
        self._states = memory.states
        self.device = model.parameters.device
        self.page_tokens = page_tokens
        self._block_tokens = block_tokens
        is_batch_invariant = block_tokens is not None
        self.sampler = Sampler(max_rows + 1, model.config.vocab, context_tokens, self.device)
        max_pages = -(-context_tokens // page_tokens)
        # One row more: the padding row of captured graphs, whose pages are all the padding page.
        self._tables = PageTables(len(model.architecture.windows), max_rows + 1, max_pages, page_tokens, self.device)
        self._last_tokens = torch.zeros(max_rows + 1, dtype=torch.int64, device=self.device)
        self.pictures: PictureEncoder | None = None
        """None on a rank without a tower."""
        if model.tower is not None:
            self.pictures = PictureEncoder(
                model.tower, config.pass_patches, self.device, is_batch_invariant=is_batch_invariant
            )
        has_axes = model.architecture.pictures.has_axes
        self._num_rope_positions = model.ropes.num_positions if has_axes else None
        self._threads = StepThreads() if self.device.type == "cpu" and not is_batch_invariant else None
        if capture is None:
            capture = default_capture(model, is_batch_invariant=is_batch_invariant)
        self._graphs = ModelGraphs(
            model,
            self._tables.on_device,
            self._last_tokens,
            capture,
            context_tokens=context_tokens,
            step_tokens=config.step_tokens,
            block_tokens=block_tokens,
            checks_drafts=config.checks_drafts,
            graph_tokens=config.graph_tokens,
        )
        group = model.parameters.group
        self._draws_alone = group.shard.is_whole
        has_draw_graphs = self.device.type == "cuda" and self._draws_alone
        self._draw_graphs = DrawGraphs(self.sampler, self._last_tokens) if has_draw_graphs else None
        self._proposals: Proposals | None = None
        if proposer is not None:
            # Ranks capture the same graphs in the same order, and a draft model is on the first one alone.
            is_captured = isinstance(capture, CudaCapture) and not is_batch_invariant
            is_captured &= self._draws_alone or proposer.group is group
            table, hidden = self._tables.on_device[0], (model.config.hidden, model.parameters.dtype)
            # With memory of its own: its passes run between a step and the reading of the step's results.
            own = CudaCapture(may_fail=True) if is_captured else None
            arguments = (table, page_tokens, context_tokens, hidden, self._upload, own)
            self._proposals = Proposals(proposer, *arguments, has_axes=self._num_rope_positions is not None)

    def prepare(self) -> bool:
        """Captures the graph of one more batch size, the smallest first. False if nothing is left."""
        with torch.inference_mode():
            return self._capture_next() or self._capture_draw()

    def _capture_draw(self) -> bool:
        steps = self._graphs.steps
        return self._draw_graphs is not None and steps is not None and self._draw_graphs.prepare(steps)

    def compute_prompt(self, num_tokens: int) -> None:
        """Computes a prompt of `num_tokens` empty tokens, for the pass that collects the kernels of steps longer than
        the largest graph."""
        with torch.inference_mode():
            if self._graphs.prompts is not None:
                self._graphs.prompts.compute(num_tokens)

    def compute_draws(self) -> None:
        """Draws in every way from empty logits, for the pass that collects kernels."""
        with torch.inference_mode():
            hidden = torch.empty((1, self.model.config.hidden), dtype=self.model.parameters.dtype, device=self.device)
            self.sampler.compute_all_kinds(self._logits(hidden))

    @property
    def graph_costs(self) -> CaptureCosts:
        """Memory and time that the graphs have taken so far."""
        return self._graphs.costs

    def prepare_first(self) -> None:
        """Captures the graphs that a short prompt and its response use."""
        while self._graphs.lacking_first:
            self.prepare()

    def _capture_next(self) -> bool:
        return self._next_graphs is not None and self._next_graphs.prepare()

    @property
    def _next_graphs(self) -> SizedGraphs | None:
        """The graphs to capture next."""
        return self._graphs.next_among(() if self._proposals is None else self._proposals.graphs)

    @property
    def mixed_sizes(self) -> Mapping[int, tuple[int, ...]]:
        """Prompt token counts of graphs, by the number of streams that they also compute; empty without such graphs."""
        return self._graphs.mixed_sizes

    @property
    def max_draft_tokens(self) -> int:
        """Most tokens of a fast step that checks drafts; 0 if no such step is fast."""
        if self._block_tokens is not None:
            return 0
        if self.device.type == "cpu":
            return MAX_NATIVE_ROWS  # without a graph, other steps have none either
        return 0 if self._graphs.drafts is None else self._graphs.drafts.max_rows

    def launch(self, plan: StepPlan, draws: Sequence[Draw], mask: NewMask | None = None) -> Launched:
        """Starts a step. `draws`: the plan's drawing rows in order; `mask`: returns the tokens that they may draw.

        Raises FaultyRequest if the parameters of one request are at fault; retract the plan then."""
        with torch.inference_mode():
            for row, request, past in plan.new_rows:
                try:
                    self.sampler.assign(row, request, past)
                except Exception as error:
                    raise FaultyRequest(request.id) from error
            return self._run(plan, draws, mask)

    def _run(self, plan: StepPlan, draws: Sequence[Draw], mask: NewMask | None) -> Launched:
        """Starts a step whose requests have their rows."""
        with torch.inference_mode():
            if self.model.parameters.host is not None:
                self.model.parameters.host.between_steps()
            self._tables.extend(plan.new_pages)
            self._memory.copy_pages(plan.page_copies)
            if self._states is not None:
                self._states.copy(plan.restores)
            launched = self._compute(plan, draws, mask)
            if self._states is not None:
                self._states.copy(plan.saves)
            return launched

    def _compute(self, plan: StepPlan, draws: Sequence[Draw], mask: NewMask | None) -> Launched:
        """Starts a step whose rows have their pages and states."""
        inputs = StepInputs.of(
            plan,
            self._tables.on_host,
            self.page_tokens,
            self._num_rope_positions,
            whole_pictures=self.model.architecture.pictures.is_whole,
        )
        scores: list[PromptScores] = []
        proposes = self._proposals is not None and plan.num_proposals is not None
        # The draw replaces the rows' latest tokens. Otherwise the device should not wait for these.
        tokens = self._tokens(inputs) if proposes and len(inputs.drawn_before) else None
        is_single, num_tokens = plan.num_singles == len(plan.rows), plan.num_tokens
        is_scored = any(row.outputs.scores is not None for row in plan.rows)
        is_small = not is_scored and (is_single or plan.only_decodes)
        graphs = None if not is_small else self._graphs.steps if is_single else self._graphs.drafts
        hidden: Tensor | None
        with self._threads.decoding(num_tokens) if self._threads and is_small else nullcontext():
            if graphs is not None and graphs.fits(num_tokens):
                drawn, hidden = self._replay(graphs, plan, inputs, draws, mask)
            else:
                drawn, hidden = self._forward(plan, inputs, draws, mask, scores)
            if proposes and tokens is None:
                tokens = self._tokens(inputs)
            proposed = self._propose(plan, inputs, tokens, drawn, hidden)
        return Launched(self.device, plan.rows, drawn, scores, proposed)

    def _propose(
        self, plan: StepPlan, inputs: StepInputs, tokens: Tensor | None, drawn: Drawn | None, hidden: Tensor | None
    ) -> Tensor | None:
        """The draft tokens of the rows that draw. `tokens`: those of the step."""
        if self._proposals is None or tokens is None or hidden is None:
            return None
        return self._proposals.run(
            plan,
            inputs,
            tokens,
            lambda: self._batch(plan, inputs),
            None if drawn is None else drawn.tokens,
            hidden,
            self._tables.ends,
        )

    def _replay(
        self, graphs: StepGraphs, plan: StepPlan, inputs: StepInputs, draws: Sequence[Draw], mask: NewMask | None
    ) -> tuple[Drawn | None, Tensor]:
        """Runs a step of single tokens, or of rows that check drafts, through a captured graph. Returns the draws, and
        the residual stream as `_hidden` does."""
        if graphs is self._graphs.steps:
            self._upload_tokens(plan)
            replayed = graphs.replay(inputs.rows, inputs.positions, inputs.slots, rope=inputs.rope)
        else:
            owners = np.repeat(inputs.rows, np.diff(inputs.offsets))
            # A row that computes tokens again may be in a step with rows whose tokens only the device knows.
            given = self._tokens(inputs) if len(inputs.drawn_before) else inputs.tokens
            replayed = graphs.replay(owners, inputs.positions, inputs.slots, given, inputs.rope)
        logits, tokens, healthy, hidden = replayed
        if not draws:
            return None, hidden
        allowed = None if mask is None else mask()
        if self._draws_alone and len(draws) == len(tokens) and allowed is None:
            if self.sampler.is_plain(draws):
                return Drawn(tokens, healthy), hidden
            if graphs is self._graphs.steps and self._draw_graphs is not None:
                lines = draw_lines(inputs.last, inputs.positions, draws, None)
                drawn = self._draw_graphs.draw(graphs.all_logits(len(draws)), lines)
                if drawn is not None:
                    return drawn, hidden
        return self._draw_from(logits, inputs.last, inputs, draws, allowed), hidden

    def _draw_from(
        self,
        logits: Tensor,
        index: NDArray[np.int64],
        inputs: StepInputs,
        draws: Sequence[Draw],
        mask: GrammarMask | None,
    ) -> Drawn:
        """Draws the step's tokens, which become the latest of their rows. `index`: the row of `logits` that each draw
        is from."""
        lines = draw_lines(index, inputs.positions[inputs.last], draws, mask)
        words = self.sampler.no_mask if mask is None else mask.words
        placed = Draws(self._upload(lines), words, is_masked=mask is not None)
        drawn = self._draw(logits, placed, lines[:, 1])
        self._last_tokens.index_copy_(0, placed.rows, drawn.tokens)
        return drawn

    def _upload_tokens(self, plan: StepPlan) -> None:
        """Sets the latest tokens of the rows of one token whose token the host gives."""
        streams = plan.rows[: plan.num_singles]
        given = [(row.row, row.inputs.tokens[0]) for row in streams if row.inputs.tokens is not None]
        if len(given) == 1:
            ((row_id, token),) = given
            self._last_tokens[row_id : row_id + 1].fill_(token)
        elif given:
            rows, tokens = upload(self.device, *np.array(given, dtype=np.int64).T)
            self._last_tokens.index_copy_(0, rows, tokens)

    def _forward(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        draws: Sequence[Draw],
        mask: NewMask | None,
        scores: list[PromptScores],
    ) -> tuple[Drawn | None, Tensor | None]:
        """Runs any step, one launch per operation except for the layers of short prompts. Adds the scores of prompts
        to `scores`. Returns what `_replay` does."""
        hidden = self._hidden(plan, inputs)
        scores += score_prompts(self._logits, hidden, plan, inputs, self._upload)
        if not draws:
            return None, hidden
        logits = self._logits(hidden.index_select(0, self._upload(self._padded(inputs.last))))
        allowed = None if mask is None else mask()
        return self._draw_from(logits, np.arange(len(draws)), inputs, draws, allowed), hidden

    def _padded(self, last: NDArray[np.int64]) -> NDArray[np.int64]:
        """The places of drawn tokens, repeated up to a number of rows that has a graph: for other numbers, libraries
        load other kernels when they are first used, and wait for all launched steps then."""
        steps = self._graphs.steps
        if self._graphs.prompts is None or steps is None:
            return last
        return np.pad(last, (0, steps.padded(len(last)) - len(last)), mode="edge")

    def _hidden(self, plan: StepPlan, inputs: StepInputs) -> Tensor:
        """The residual stream after the last layer, of the tokens that are drawn after or scored: [tokens, hidden]"""
        graphs = self._graphs.taking(plan, inputs)
        if graphs is not None:
            self._upload_tokens(plan)
            return graphs.replay(inputs, plan.num_singles)
        if self._block_tokens is None:
            return self.model(self._batch(plan, inputs))
        tokens, pictures = self._tokens(inputs), self._placed(inputs)
        shared = (inputs, tokens, self._tables.on_device, self._upload, pictures)
        blocks = batch_invariant.batches(plan.rows, self._block_tokens, *shared)
        return torch.cat([self.model(batch)[:count] for batch, count in blocks])

    def _logits(self, hidden: Tensor) -> Tensor:
        """hidden: [any rows, hidden] → [rows, vocab]"""
        if self._block_tokens is None:
            return self.model.logits(hidden)
        return batch_invariant.in_blocks(self.model.logits, hidden, self._block_tokens)

    def _draw(self, logits: Tensor, draws: Draws, rows: NDArray[np.int64]) -> Drawn:
        """See `Sampler.draw`."""
        return self.sampler.draw(logits, draws, rows)

    def _batch(self, plan: StepPlan, inputs: StepInputs) -> Batch:
        singles = plan.num_singles
        slots, positions, rows, lengths, offsets, tiles, cuts = upload(
            self.device,
            inputs.slots,
            inputs.positions,
            inputs.rows,
            inputs.lengths,
            (inputs.offsets[singles:] - singles).astype(np.int32),
            prefill_tiles([row.count for row in plan.rows[singles:]]),
            inputs.cuts[singles:],
        )
        first, *others = slots
        return Batch(
            tokens=self._tokens(inputs),
            positions=positions,
            slots=first,
            rows=rows,
            lengths=lengths,
            page_table=self._tables.on_device[0],
            num_decodes=singles,
            max_length=int(inputs.lengths.max()),
            prefills=tuple(
                PrefillRow(row.row, row.start, row.count, int(offset), *(row.cut or ()))
                for row, offset in zip(plan.rows[singles:], inputs.offsets[singles:], strict=False)
            ),
            prefill_offsets=offsets,
            prefill_tiles=tiles,
            prefill_cuts=None if self._states is None else cuts,
            rope=None if inputs.rope is None else self._upload(inputs.rope),
            pictures=self._placed(inputs),
            reach=None if inputs.reach is None else self._upload(inputs.reach),
        ).with_groups(others, self._tables.on_device[1:])

    def _placed(self, inputs: StepInputs) -> PictureVectors | None:
        """The vectors of the step's pictures, whose positions get their rotations."""
        pictures = inputs.pictures
        if pictures is None:
            return None
        if pictures.axes is not None:
            self.model.ropes.place(self._upload(pictures.axes))
        return PictureVectors(self._upload(pictures.index), self._vectors(pictures))

    def _vectors(self, pictures: PictureInputs) -> Tensor:
        """[vectors, parts, hidden]"""
        assert self.pictures is not None, "a step has pictures, but the model has no vision tower"
        return self.pictures.vectors(pictures.spans, pictures.counts).to(self.model.parameters.dtype)

    def _tokens(self, inputs: StepInputs) -> Tensor:
        """The tokens of the step, with those that earlier steps drew on the device."""
        if not len(inputs.drawn_before):
            return self._upload(inputs.tokens)
        # The rows of one token come first, so that a token is at the same place as its row.
        drawn = inputs.drawn_before
        tokens, index, rows = upload(self.device, inputs.tokens, drawn, inputs.rows[drawn])
        return tokens.index_copy_(0, index, self._last_tokens.index_select(0, rows))

    def _upload(self, array: NDArray[Any]) -> Tensor:
        return upload(self.device, array)[0]
