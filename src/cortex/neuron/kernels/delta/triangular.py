"""The inverse of the triangular system of a chunk."""

from __future__ import annotations

from cortex.neuron.kernels.jit import jit, tl


@jit
def unit_inverse(system, LEVELS: tl.constexpr, FIRST: tl.constexpr, kind: tl.constexpr):
    """(1 + system)⁻¹, both [2^LEVELS, 2^LEVELS] float32; `system` is strictly lower triangular.
    The values of both are at most about 1, as with keys of unit length, decays, and strengths below 1.

    The blocks of 2^FIRST rows on the diagonal are solved row by row. Then pairs of blocks are joined, all pairs of a
    size at once: [[P, 0], [Q, R]]⁻¹ = [[P⁻¹, 0], [−R⁻¹ Q P⁻¹, R⁻¹]].
    """
    SIZE: tl.constexpr = 1 << LEVELS
    place = tl.arange(0, SIZE)
    later, earlier = place[:, None], place[None, :]
    inverse = _inverse_of_blocks(system, SIZE, 1 << FIRST)
    for level in tl.static_range(FIRST, LEVELS):
        corner = ((later >> level) % 2 == 1) & ((later >> level) - 1 == (earlier >> level))
        joined = _dot(tl.where(corner, system, 0.0), inverse, kind)
        inverse -= _dot(inverse, joined, kind)
    return inverse


@jit
def _inverse_of_blocks(system, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The inverse of the blocks on the diagonal, zero elsewhere."""
    BLOCKS: tl.constexpr = SIZE // BLOCK
    number, place = tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
    on_diagonal = (number[:, None] == number[None, :])[:, None, :, None]
    blocks = tl.sum(tl.where(on_diagonal, system.reshape(BLOCKS, BLOCK, BLOCKS, BLOCK), 0.0), 2)
    columns = tl.permute(blocks, (0, 2, 1))
    row, column = place[None, :, None], place[None, None, :]
    inverse = tl.zeros((BLOCKS, BLOCK, BLOCK), tl.float32) + tl.where(row == column, 1.0, 0.0)
    for index in range(1, BLOCK):
        weights = tl.sum(tl.where(column == index, columns, 0.0), 2)
        known = tl.sum(weights[:, :, None] * inverse, 1)
        inverse -= tl.where(row == index, known[:, None, :], 0.0)
    return tl.where(on_diagonal, inverse[:, :, None, :], 0.0).reshape(SIZE, SIZE)


@jit
def _dot(a, b, kind: tl.constexpr):
    """The product of two matrices whose values are at most about 1, float32. For layers in a type of 16 bits they are
    rounded to float16, which has three more bits than bfloat16, the type of the result's readers."""
    if kind == tl.float32:
        return tl.dot(a, b, input_precision="tf32x3")
    return tl.dot(a.to(tl.float16), b.to(tl.float16))
