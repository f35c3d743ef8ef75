/* Views of numbers of any storage type, which are read and computed as float64, LANES_F64 at a time, and their sums:
 * for the float64 path (row_float64.inl.h). Only loads and stores depend on the storage type; they handle BLOCK rows of
 * a view in one call, so that all types share the arithmetic. Sums have the order of lane_sum.h. */

/* Numbers that are read in lanes: row r is [LANES_F64] at x + r x_stride, of which lanes below n - r step are used.
 * A run of n elements is a view with step = LANES_F64. A view of n <= LANES_F64 columns has step 0, and its sums
 * stay in lanes. */
typedef struct {
    cnorm_dtype type;   /* of dy, x and out; parameters and their gradients are of its compute type */
    const void *dy, *x; /* dy: backward, else NULL */
    ptrdiff_t dy_stride, x_stride;
    ptrdiff_t rows, n, step;
    const void *gain, *bias;     /* [n], or NULL; bias: forward only */
    double all_gain, all_bias;   /* of all elements, where they are NULL */
    double dy_scale, gain_scale; /* powers of two that dy and gain are multiplied by; 1 where x is not float64 */
    void *dgain, *dbias;         /* [n] of a run, or NULL: its terms are added with its sums */
    void *out;
    ptrdiff_t out_stride;
} f64_view;

/* rows first to first + count of a view: at most BLOCK */
typedef struct {
    const f64_view *view;
    ptrdiff_t first, count;
} f64_block;

INLINE f64_block block_from(const f64_view *view, ptrdiff_t first, ptrdiff_t end)
{
    return (f64_block){view, first, end - first < BLOCK ? end - first : BLOCK};
}

static f64_view run_view(cnorm_dtype type, const void *dy, const void *x, ptrdiff_t n, void *out)
{
    return (f64_view){.type = type, /* gain 1 and bias -0: neutral */
                      .dy = dy,
                      .x = x,
                      .dy_stride = LANES_F64,
                      .x_stride = LANES_F64,
                      .rows = (n + LANES_F64 - 1) / LANES_F64,
                      .n = n,
                      .step = LANES_F64,
                      .all_gain = 1,
                      .all_bias = -0.0,
                      .dy_scale = 1,
                      .gain_scale = 1,
                      .out = out,
                      .out_stride = LANES_F64};
}

INLINE cnorm_dtype compute_type(cnorm_dtype type) { return type == CNORM_F64 ? CNORM_F64 : CNORM_F32; }

/* element i of p, of a storage type */
INLINE const void *at_element(cnorm_dtype type, const void *p, ptrdiff_t i)
{
    return (const char *)p + i * stored_bytes(type);
}

/* the lanes of row r that are used, and the rows of a block that use all */
INLINE ptrdiff_t lanes_used(const f64_view *view, ptrdiff_t r)
{
    return view->n - r * view->step < LANES_F64 ? view->n - r * view->step : LANES_F64;
}
INLINE ptrdiff_t whole_rows(f64_block b)
{
    const ptrdiff_t left = (b.view->n - b.first * b.view->step) / LANES_F64;
    return left < b.count && (b.view->step || !left) ? left : b.count;
}

/* rows of LANES_F64 numbers, `stride` bytes apart */
static NOINLINE void widen_lanes(cnorm_dtype type, const char *from, ptrdiff_t stride, ptrdiff_t rows, wide_f64 *to)
{
    for (ptrdiff_t r = 0; r < rows && type == CNORM_F64; ++r) to[r] = wide_at_f64((const void *)(from + r * stride));
    for (ptrdiff_t r = 0; r < rows && type == CNORM_F32; ++r) to[r] = wide_at_f32((const void *)(from + r * stride));
    for (ptrdiff_t r = 0; r < rows && type == CNORM_F16; ++r) to[r] = wide_at_f16((const void *)(from + r * stride));
    for (ptrdiff_t r = 0; r < rows && type == CNORM_BF16; ++r) to[r] = wide_at_bf16((const void *)(from + r * stride));
}
static NOINLINE void narrow_lanes(cnorm_dtype type, const wide_f64 *from, ptrdiff_t rows, char *to, ptrdiff_t stride)
{
    for (ptrdiff_t r = 0; r < rows && type == CNORM_F64; ++r) put_wide_f64((void *)(to + r * stride), from[r]);
    for (ptrdiff_t r = 0; r < rows && type == CNORM_F32; ++r) put_wide_f32((void *)(to + r * stride), from[r]);
    for (ptrdiff_t r = 0; r < rows && type == CNORM_F16; ++r) put_wide_f16((void *)(to + r * stride), from[r]);
    for (ptrdiff_t r = 0; r < rows && type == CNORM_BF16; ++r) put_wide_bf16((void *)(to + r * stride), from[r]);
}

/* A row's numbers, followed by zeros: of a row of a view that does not use all lanes */
typedef union {
    char bytes[LANES_F64 * sizeof(double)];
    double align;
} partial_lanes;

/* The rows of a block from an array of `type` that begins at p and has the shape of the view; lanes that are not used
 * are zero */
static NOINLINE void load_block(f64_block b, cnorm_dtype type, const void *p, ptrdiff_t stride, wide_f64 to[BLOCK])
{
    const char *from = at_element(type, p, b.first * stride);
    const ptrdiff_t item = stored_bytes(type), whole = whole_rows(b);
    widen_lanes(type, from, stride * item, whole, to);
    for (ptrdiff_t r = whole; r < b.count; ++r) {
        partial_lanes lanes = {{0}};
        memcpy(lanes.bytes, from + r * stride * item, (size_t)(lanes_used(b.view, b.first + r) * item));
        widen_lanes(type, lanes.bytes, 0, 1, to + r);
    }
}
static NOINLINE void store_block(f64_block b, cnorm_dtype type, const wide_f64 from[BLOCK], void *p, ptrdiff_t stride)
{
    char *to = (char *)p + b.first * stride * stored_bytes(type);
    const ptrdiff_t item = stored_bytes(type), whole = whole_rows(b);
    narrow_lanes(type, from, whole, to, stride * item);
    for (ptrdiff_t r = whole; r < b.count; ++r) {
        partial_lanes lanes;
        narrow_lanes(type, from + r, 1, lanes.bytes, 0);
        memcpy(to + r * stride * item, lanes.bytes, (size_t)(lanes_used(b.view, b.first + r) * item));
    }
}
INLINE void load_params(f64_block b, const void *param, double all, wide_f64 to[BLOCK])
{
    if (param) load_block(b, compute_type(b.view->type), param, b.view->step, to);
    for (ptrdiff_t r = 0; r < b.count && !param; ++r) to[r] = wide_of(all);
}
INLINE void load_x(f64_block b, wide_f64 x[BLOCK]) { load_block(b, b.view->type, b.view->x, b.view->x_stride, x); }
INLINE void store_out(f64_block b, const wide_f64 out[BLOCK])
{
    store_block(b, b.view->type, out, b.view->out, b.view->out_stride);
}

/* d = x scale - origin, and xhat = (d - delta) rstd */
INLINE wide_f64 f64_deviation(const wide_stats *e, wide_f64 x)
{
    EACH(i, LANE_VECTORS) x.v[i] = x.v[i] * e->scale.v[i] - e->origin.v[i];
    return x;
}
INLINE wide_f64 f64_xhat(const wide_stats *e, wide_f64 x)
{
    x = f64_deviation(e, x);
    EACH(i, LANE_VECTORS) x.v[i] = (x.v[i] - e->delta.v[i]) * e->rstd.v[i];
    return x;
}

/* param [n] += terms, in float64 and rounded */
static void f64_add(f64_block b, void *param, const wide_f64 terms[BLOCK])
{
    wide_f64 sum[BLOCK];
    load_block(b, compute_type(b.view->type), param, b.view->step, sum);
    for (ptrdiff_t r = 0; r < b.count; ++r)
        EACH(i, LANE_VECTORS) sum[r].v[i] += terms[r].v[i];
    store_block(b, compute_type(b.view->type), sum, param, b.view->step);
}

/* g = dy gain and xhat of a block; lanes that are not used are zero. Adds to dgain and dbias, if there are. */
static NOINLINE void f64_terms(f64_block b, const wide_stats *e, wide_f64 g[BLOCK], wide_f64 xhat[BLOCK])
{
    const f64_view *view = b.view;
    wide_f64 gain[BLOCK];
    load_x(b, xhat);
    load_block(b, view->type, view->dy, view->dy_stride, g);
    for (ptrdiff_t r = 0; r < b.count; ++r) {
        xhat[r] = first_lanes(f64_xhat(e, xhat[r]), lanes_used(view, b.first + r));
        EACH(i, LANE_VECTORS) gain[r].v[i] = g[r].v[i] * xhat[r].v[i];
    }
    if (view->dgain) f64_add(b, view->dgain, gain), f64_add(b, view->dbias, g);
    load_params(b, view->gain, view->all_gain, gain);
    for (ptrdiff_t r = 0; r < b.count; ++r)
        EACH(i, LANE_VECTORS)
            g[r].v[i] = g[r].v[i] * splat_f64(view->dy_scale) * (gain[r].v[i] * splat_f64(view->gain_scale));
}

/* The two sums in each lane over rows begin to end of a view: of d and d^2, or backward of g and g xhat */
static NOINLINE void f64_lane_sums(const f64_view *view, ptrdiff_t begin, ptrdiff_t end, const wide_stats *e,
                                   wide_f64 sums[2])
{
    const int backward = view->dy != NULL;
    wide_f64 A = wide_of(0), B = A;
    for (ptrdiff_t first = begin; first < end; first += BLOCK) {
        const f64_block block = block_from(view, first, end);
        wide_f64 g[BLOCK], xhat[BLOCK], a = wide_of(0), b = a;
        if (backward) f64_terms(block, e, g, xhat);
        else load_x(block, g);
        for (ptrdiff_t r = 0; r < block.count; ++r) {
            const wide_f64 v = backward ? g[r] : first_lanes(f64_deviation(e, g[r]), lanes_used(view, first + r)),
                           with = backward ? xhat[r] : v;
            EACH(i, LANE_VECTORS) a.v[i] += v.v[i], b.v[i] += v.v[i] * with.v[i];
        }
        EACH(i, LANE_VECTORS) A.v[i] += a.v[i], B.v[i] += b.v[i];
    }
    sums[0] = A, sums[1] = B;
}

/* the same over a run */
static NOINLINE row_sums f64_run_sums(const f64_view *view, const f64_stats *stats)
{
    enum { ROWS = FOLD / LANES_F64 };
    const wide_stats e = wide_stats_of(stats, 1);
    row_sums sums = {0, 0};
    for (ptrdiff_t r = 0; r < view->rows; r += ROWS) {
        wide_f64 lanes[2];
        f64_lane_sums(view, r, view->rows - r < ROWS ? view->rows : r + ROWS, &e, lanes);
        sums.a += tree_f64(lanes[0].v);
        sums.b += tree_f64(lanes[1].v);
    }
    return sums;
}
