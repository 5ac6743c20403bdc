// Rows of quantised matrices.

#include "tiles.h"

static void look_up(const Matrix *m, int64_t number, float *out) {
    const int bits = m->bits;
    const int64_t size = tile_bytes(bits, m->has_minimums), lane = number % ROWS;
    const uint8_t *tile = block_at(m, number / ROWS);
    for (int64_t t = 0; t < m->tiles; t++, tile += size) {
        for (int column = 0; column < COLUMNS; column++) {
            const int step = column / 4;
            const uint8_t *from = tile + lane * 4 + column % 4;
            int code = bits == 8 ? from[step * STEP_BYTES] : 0;
            if (has_four(bits)) code = from[step / 2 * STEP_BYTES] >> (step % 2 * 4) & 15;
            if (bits == CODEBOOK) code = m->table[code];
            int place = has_four(bits) ? 4 : 0;
            if (has_two(bits)) {
                code |= (from[twos_at(bits) + step / 4 * STEP_BYTES] >> (step % 4 * 2) & 3) << place;
                place += 2;
            }
            if (has_one(bits)) code |= (from[ones_at(bits)] >> step & 1) << place;
            const int part = lane / LANES, at = lane % LANES, group = column * groups_of(bits) / COLUMNS;
            float scale, minimum = 0;
            if (bits == 2) {
                const int32_t shorts = shorts_at(tile, group, part)[at];
                scale = units_at(tile, t, part, 0)[at] * (shorts & 15);
                minimum = -units_at(tile, t, part, 1)[at] * (shorts >> 4);
            } else {
                const uint8_t *scales = tile + codes_bytes(bits) + group * ROWS * 2 + part * WIDTH / 2;
                scale = halves_at(scales)[at];
                if (m->has_minimums) minimum = halves_at(scales + groups_of(bits) * ROWS * 2)[at];
            }
            out[t * COLUMNS + column] = ((float)(code - m->zero) * scale + minimum) * UNIT;
        }
    }
}

void run_lookup(const Lookup *lookup, const Member *member) {
    const Matrix *m = lookup->matrix;
    const int64_t columns = m->tiles * COLUMNS;
    for (int64_t row; (row = take(member->team, 1)) < member->team->rows;) {
        const int64_t number = lookup->ids[row];
        float *line = number < 0 || number >= m->outputs ? 0 : malloc(columns * sizeof(float));
        if (!line) {
            fail(member->team, number < 0 || number >= m->outputs ? NO_SUCH_ROW : NO_MEMORY);
            continue;
        }
        look_up(m, number, line);
        narrow(line, columns, lookup->out, row * columns, lookup->is_half);
        free(line);
    }
}
