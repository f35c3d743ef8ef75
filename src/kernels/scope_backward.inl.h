/* From the gradient of a cell's pre-activations to that of its two products: equation (9) of cnorm_train.h, in its
 * notation. Padding stays zero in every gradient. */

/* the inputs, outputs and scratch of one row of a batch */
typedef struct row_backward {
    const cnorm_cell *cell;
    gate_inputs in;             /* on the tape */
    float *zx, *zh, *z2;        /* on the tape */
    const float *gates, *h, *c; /* on the tape; h and c before the step */
    float *dh, *dc;             /* [padded outputs], [padded units] */
    float *da, *dm;             /* [gates, padded units]; [padded units]: dm of (2), later u of (7). da may be
                                   zx: of each unit all gates are read before one is written */
    float *scratch, *sums;      /* [6, padded units]; gradients of the cell's vectors, at the offsets `at` */
    vector_sums at;
    ptrdiff_t width;
} row_backward;

INLINE void add_to(float *sum, f32v v) { store_f32(sum, load_f32(sum) + v); }

/* (9) of one group in float64: from da and q = z scale to dz; mean is that of dq, mean_dq_q that of dq q */
RARE void norm_backward_f64(ptrdiff_t length, double n, double rstd, float scale, const float *gain, const float *da,
                            float *z)
{
    double mean = 0, mean_dq_q = 0;
    for (ptrdiff_t j = 0; j < length; ++j) {
        const double dq = (double)da[j] * (double)gain[j];
        mean += dq;
        mean_dq_q += dq * (double)(z[j] * scale);
    }
    mean /= n;
    mean_dq_q /= n;
    for (ptrdiff_t j = 0; j < length; ++j)
        z[j] = (float)(rstd * ((double)da[j] * (double)gain[j] - mean - (double)(z[j] * scale) * mean_dq_q));
}

/* (9): the gradient of a normalised product: z [gates, padded units] -> dz; adds to dgain and dinside, both of z's
 * shape */
static NOINLINE void norm_backward(const cnorm_matrix *w, const float *gain, const float *da, float *z,
                                   const float *rstds, float *dgain, float *dinside)
{
    const ptrdiff_t width = padded_units(w->units);
    for (ptrdiff_t first = 0; first < w->gates; first += w->group) {
        const ptrdiff_t gates = w->gates - first < w->group ? w->gates - first : w->group;
        const ptrdiff_t begin = first * width, length = gates * width;
        const double n = (double)(gates * w->units);
        const f32v scale = splat_f32(rstds[first]);
        lane_sum dq_sum = {.total = 0}, dq_q_sum = dq_sum;
        double rstd;
        memcpy(&rstd, rstds + WIDE_RSTD + 2 * first, sizeof rstd);
        for (ptrdiff_t start = begin; start < begin + length; start += FOLD) {
            const ptrdiff_t end = begin + length - start < FOLD ? begin + length : start + FOLD;
            for (ptrdiff_t j = start; j < end; j += LANES_F32)
                EACH(i, LANE_VECTORS) {
                    const ptrdiff_t k = j + i * VL_F32;
                    if (k >= end) break;
                    const f32v q = load_f32(z + k) * scale, d = load_f32(da + k), dq = d * load_f32(gain + k);
                    add_to(dgain + k, d * q);
                    dq_sum.lanes[i] += dq;
                    dq_q_sum.lanes[i] += dq * q;
                }
            fold(&dq_sum);
            fold(&dq_q_sum);
        }
        if (rstd >= 0x1p-60 && rstd <= 0x1p60 && fabs(dq_sum.total) <= 0x1p60 && fabs(dq_q_sum.total) <= 0x1p60) {
            const f32v mean = splat_f32((float)(dq_sum.total / n)), mean_dq_q = splat_f32((float)(dq_q_sum.total / n)),
                       wide = splat_f32((float)rstd);
            for (ptrdiff_t k = begin; k < begin + length; k += VL_F32) {
                const f32v dq = load_f32(da + k) * load_f32(gain + k);
                store_f32(z + k, wide * ((dq - mean) - (load_f32(z + k) * scale) * mean_dq_q));
            }
        } else {
            norm_backward_f64(length, n, rstd, rstds[first], gain + begin, da + begin, z + begin);
        }
        for (ptrdiff_t g = first; g < first + gates; ++g)
            for (ptrdiff_t j = w->units; j < width; ++j) z[g * width + j] = 0;
        for (ptrdiff_t k = begin; k < begin + length; k += VL_F32) add_to(dinside + k, load_f32(z + k));
    }
}

/* (9) for both products; `reset` is the s(r) of CNORM_RESET_AFTER, else NULL */
static void scope_backward(const row_backward *row, const float *reset)
{
    const cnorm_cell *cell = row->cell;
    const ptrdiff_t width = row->width, length = cell->weight_x.gates * width, length_h = cell->weight_h.gates * width;
    float *sums = row->sums, *da = row->da;
    for (ptrdiff_t j = 0; j < length; j += VL_F32) add_to(sums + row->at.bias + j, load_f32(da + j));
    if (cell->scope == CNORM_SCOPE_SPLIT)
        norm_backward(&cell->weight_x, cell->gain_x, da, row->zx, row->in.rstd_x, sums + row->at.gain_x,
                      sums + row->at.inside_x);
    const int none = cell->scope == CNORM_SCOPE_NONE;
    float *of_h = none ? row->zh : da;
    if (none && row->zx != da) memcpy(row->zx, da, (size_t)length * sizeof *da);
    if (none && row->zh != da) memcpy(row->zh, da, (size_t)length_h * sizeof *da);
    if (reset) /* (7): the part of h */
        for (ptrdiff_t j = 0; j < width; j += VL_F32) {
            const f32v dn = load_f32(of_h + 2 * width + j) * load_f32(reset + j);
            store_f32(of_h + 2 * width + j, dn);
            add_to(sums + row->at.bias_n + j, dn);
        }
    if (!none) {
        const ptrdiff_t inside = cell->scope == CNORM_SCOPE_SUM ? row->at.inside_x : row->at.inside_h;
        norm_backward(&cell->weight_h, cell->gain_h, da, row->zh, row->in.rstd_h, sums + row->at.gain_h, sums + inside);
    }
    if (cell->scope == CNORM_SCOPE_SUM) memcpy(row->zx, row->zh, (size_t)length * sizeof *da);
}
