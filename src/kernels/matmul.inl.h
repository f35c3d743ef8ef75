/* Products of a packed matrix with several vectors, by the sums of matvec.inl.h: the same bits for each vector. The
 * sums of a tile, TILE_VECTORS of rows and TILE_STREAMS vectors x, stay in registers. A strip of weights, TILE_INPUTS
 * columns of a tile, stays in L1 while all x pass; z then holds the sums so far. */

/* A product with several vectors */
typedef struct product_call {
    const cnorm_matrix *w;
    ptrdiff_t n;
    const float *const *x;
    product_options options;
    float *z; /* [vectors, packed rows] */
    ptrdiff_t z_stride;
    const void *strip;       /* of weights, from the tile's first row and the strip's first column on */
    ptrdiff_t column, panel; /* its elements from one column to the next, and from one panel to the next */
    ptrdiff_t next, apart;   /* bytes of W's panels to the next strip, and from one panel to the next */
} product_call;

/* a tile of the strip from column k on: z = W x + add, or its sum so far, for the rows of W from r on that `width`
 * vectors hold, and the `count` vectors x from `first` on; half, width and count are constants. Each block is added to
 * z in memory: to spill registers with the sums took 1.1 times as long (AVX2 on Zen 3, 2026-11-30). */
INLINE void product_tile(const product_call *call, int half, int width, int count, ptrdiff_t r, ptrdiff_t first,
                         ptrdiff_t k)
{
    enum { PER = PANEL / VL_F32, LINES = 128 }; /* vectors of a panel; bytes of each of the next strip's to prefetch */
    const ptrdiff_t cols = call->w->cols, column = call->column, panel = call->panel;
    const ptrdiff_t end = cols - k < TILE_INPUTS ? cols : k + TILE_INPUTS;
    const char *strip = call->strip;
    ptrdiff_t at = 0, ahead = call->next + first / TILE_STREAMS * (TILE_INPUTS / BLOCK * LINES);
    const float *x[TILE_STREAMS];
    EACH(s, count) x[s] = call->x[first + s];
    while (k < end) {
        const ptrdiff_t begin = k, stop = end - k < BLOCK ? end : k + BLOCK;
        f32v block[TILE_VECTORS * TILE_STREAMS];
        EACH(v, width)
            if (count == TILE_STREAMS && v % PER == 0) prefetch(call->w->panels, v / PER * call->apart + ahead, LINES);
        ahead += LINES;
        EACH(later, 2) /* the first column, and the others */
            for (const ptrdiff_t until = later ? stop : k + 1; k < until; ++k, at += column) {
                f32v weights[TILE_VECTORS];
                EACH(v, width) {
                    weights[v] = load_weights(strip, at + v / PER * panel + v % PER * VL_F32, half);
                    if (width * (count + 1) < REGISTERS) weights[v] = keep_f32(weights[v]);
                }
                EACH(j, width * count) {
                    const f32v factor = splat_f32(x[j / width][k]);
                    block[j] = later ? fma_f32(weights[j % width], factor, block[j]) : weights[j % width] * factor;
                }
            }
        float *z = call->z + first * call->z_stride + r;
        EACH(s, count) {
            if (begin == BLOCK) prefetch(z, count * call->z_stride * (ptrdiff_t)sizeof(float), width * VECTOR_BYTES);
            EACH(v, width) {
                const f32v so_far = begin ? load_f32(z + v * VL_F32) : splat_f32(0);
                store_f32(z + v * VL_F32, so_far + block[s * width + v]);
            }
            z += call->z_stride;
            __asm__("" : "+r"(z)); /* one address, not one of each vector */
        }
    }
    if (end < cols || !call->options.add) return;
    EACH(j, width * count) {
        const ptrdiff_t s = first + j / width, to = r + j % width * VL_F32;
        float *z = call->z + s * call->z_stride + to;
        store_f32(z, load_f32(z) + load_f32(call->options.add + s * call->options.stride + to));
    }
}

/* of the vectors that are left, how many a tile takes; 1 only of 1 */
INLINE ptrdiff_t tile_streams(ptrdiff_t left)
{
    return left <= TILE_STREAMS ? left : left == TILE_STREAMS + 1 ? left - 2 : TILE_STREAMS;
}

/* the strip of a tile of rows from r on and columns from k on; in `space`, if given, float16 is widened for all x */
INLINE void find_strip(product_call *call, int half, int width, ptrdiff_t r, ptrdiff_t k, float *space)
{
    const cnorm_matrix *w = call->w;
    const ptrdiff_t panel = w->cols * PANEL, at = r / PANEL * panel + r % PANEL + k * PANEL;
    const ptrdiff_t cols = w->cols - k < TILE_INPUTS ? w->cols - k : TILE_INPUTS;
    const ptrdiff_t item = half || space ? (ptrdiff_t)sizeof(uint16_t) : (ptrdiff_t)sizeof(float);
    call->strip = space ? (const char *)space : (const char *)w->panels + at * item;
    call->next = (at + TILE_INPUTS * PANEL) * item;
    call->apart = panel * item;
    call->column = space ? width * VL_F32 : PANEL;
    call->panel = space ? PANEL : panel;
    if (!space) return;
    for (ptrdiff_t i = 0; i < cols; ++i)
        EACH(v, width) {
            const ptrdiff_t from = at + i * PANEL + v * VL_F32 / PANEL * panel + v * VL_F32 % PANEL;
            store_f32(space + (i * width + v) * VL_F32, load_weights(w->panels, from, 1));
        }
}

/* tiles of `width` vectors of rows, as many as fit from row r on; returns the row after them */
INLINE ptrdiff_t product_tiles(product_call *call, int half, int width, ptrdiff_t r, float *space)
{
    const ptrdiff_t cols = call->w->cols;
    for (; r + width * VL_F32 <= used_rows(call->w); r += width * VL_F32)
        for (ptrdiff_t k = 0; k < cols; k += TILE_INPUTS) {
            find_strip(call, half, width, r, k, space);
            for (ptrdiff_t s = 0, count; s < call->n; s += count) {
                count = tile_streams(call->n - s); /* never 1 */
                if (count == 2) product_tile(call, half, width, 2, r, s, k);
                else if (count == 3) product_tile(call, half, width, 3, r, s, k);
                else if (TILE_STREAMS == 4) product_tile(call, half, width, TILE_STREAMS, r, s, k);
            }
        }
    return r;
}

INLINE void tiled_products(product_call *call, int half, float *space)
{
    ptrdiff_t r = product_tiles(call, half, TILE_VECTORS, 0, space);
    if (TILE_VECTORS * VL_F32 > CNORM_GATE_PAD) r = product_tiles(call, half, TILE_VECTORS / 2, r, space);
    if (TILE_VECTORS * VL_F32 > 2 * CNORM_GATE_PAD) r = product_tiles(call, half, TILE_VECTORS / 4, r, space);
    for (; r < packed_rows(call->w); r += VL_F32) /* zeros, which a sum of squares may include */
        for (ptrdiff_t s = 0; s < call->n; ++s) store_f32(call->z + s * call->z_stride + r, splat_f32(0));
}

/* products of float32 or float16 weights */
static void products_of(const cnorm_matrix *w, ptrdiff_t n, const float *const *x, product_options options, float *z,
                        ptrdiff_t z_stride)
{
    product_call call = {.w = w, .n = n, .x = x, .options = options, .z = z, .z_stride = z_stride};
    _Alignas(CNORM_ALIGN) float space[TILE_INPUTS * TILE_VECTORS * VL_F32]; /* 16 KB */
    const int half = w->type == CNORM_WEIGHT_F16;
    if (n == 1 && half) product_of(w, 1, x[0], options, z);
    else if (n == 1 && used_rows(w) <= CNORM_GATE_PAD) narrow_product(w, x[0], options, z);
    else if (n == 1) product_of(w, 0, x[0], options, z);
    else if (half && n < WIDENED_FROM) tiled_products(&call, 1, NULL);
    else tiled_products(&call, 0, half ? space : NULL);
}

/* the bits of float32 numbers; positive ones have the order of their bits */
enum { LEAST_NORMAL = 0x00800000 /* 2^-126 */, LEAST_LARGE = 0x2b800000 /* 2^-40 */ };

/* whether x [n] has a subnormal element, or its largest is in (0, 2^-40) */
INLINE int is_tiny(ptrdiff_t n, const float *x)
{
    i32v subnormal = {0}, small = (i32v){0} - 1, any = {0}; /* the first two in their signs */
    for (ptrdiff_t k = 0; k < n; k += VL_F32) {
        const i32v magnitude = (i32v)load_first_f32(x + k, n - k) & 0x7fffffff;
        subnormal |= (magnitude - LEAST_NORMAL) & -magnitude;
        small &= magnitude - LEAST_LARGE;
        any |= magnitude;
    }
    return any_i32((i32v)(subnormal < 0)) || (!any_i32((i32v)(small >= 0)) && any_i32((i32v)(any > 0)));
}

/* |x| as a float64, exactly, from its bits: to convert a subnormal number is what floored avoids */
INLINE double wide_magnitude(int32_t bits)
{
    const int32_t magnitude = bits & 0x7fffffff;
    if (magnitude < LEAST_NORMAL) return (double)magnitude * 0x1p-149;
    const int64_t wide = ((int64_t)magnitude << 29) + ((int64_t)(1023 - 127) << 52);
    double v;
    memcpy(&v, &wide, sizeof v);
    return v;
}

/* v, or 0 where |v| is below `least`; before it is rounded to float32, which might underflow */
INLINE double or_zero(double v, double least) { return fabs(v) < least ? 0 : v; }

/* x [n] in units of a power of two, which is returned: of a tiny x the largest becomes one of [1, 2), and 0 what is
 * then below 2^-63 */
RARE double floored(ptrdiff_t n, const float *x, float *to)
{
    const int32_t largest = largest_bits(n, x);
    memcpy(to, x, (size_t)n * sizeof *to);
    if (largest >= INFINITE || !is_tiny(n, x)) return 1;
    const int exponent = exponent_of(wide_magnitude(largest));
    for (ptrdiff_t k = 0; k < n; ++k)
        to[k] = copysignf((float)or_zero(wide_magnitude(bits_of_f32(x[k])) * power_of_two(-exponent), 0x1p-63), x[k]);
    return power_of_two(exponent);
}

/* `products` where a vector is tiny */
RARE void products_floored(const cnorm_matrix *w, ptrdiff_t n, const float *const *x, product_options options, float *z,
                           ptrdiff_t z_stride, float *copies)
{
    const float *rows[CNORM_ROWS] = {NULL};
    double units[CNORM_ROWS];
    for (ptrdiff_t s = 0; s < n; ++s) {
        rows[s] = copies + s * w->cols;
        units[s] = floored(w->cols, x[s], copies + s * w->cols);
    }
    products_of(w, n, rows, (product_options){0}, z, z_stride);
    for (ptrdiff_t s = 0; s < n; ++s)
        for (ptrdiff_t r = 0; r < packed_rows(w); ++r) {
            float *to = z + s * z_stride + r;
            if (units[s] != 1) *to = (float)or_zero((double)*to * units[s], 0x1p-126);
            if (options.add) *to += options.add[s * options.stride + r];
        }
}

/* z [n, packed rows] = W x + options.add for n <= CNORM_ROWS vectors; scratch [product_scratch_floats]. A subnormal
 * operand or result may take 50 times as long (Intel), so tiny vectors are multiplied in units of their largest. */
static void products(const cnorm_matrix *w, ptrdiff_t n, const float *const *x, product_options options, float *z,
                     ptrdiff_t z_stride, float *scratch)
{
    const int int8 = w->type == CNORM_WEIGHT_I8;
    ptrdiff_t s = 0;
    while (!int8 && s < n && !is_tiny(w->cols, x[s])) ++s;
    if (int8) products_int8(w, n, x, options, z, z_stride, scratch);
    else if (s < n) products_floored(w, n, x, options, z, z_stride, scratch);
    else products_of(w, n, x, options, z, z_stride);
}
