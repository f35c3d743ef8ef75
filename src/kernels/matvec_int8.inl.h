/* Matrix-vector products of int8 weights, W[r, k] = scale[r] w[r, k], |w| <= 127. Each call quantises x to integers.
 *
 *   (1) m = max |x|, q[k] = round(x[k] levels/m), g = m/levels; q = 0 where m < 2^-100; g = NaN where x is not finite
 *   (2) zi[r] = sum of w[r, k] q[k], exact in int32: by the backends of int8/
 *   (3) z[r] = float(zi[r]) (scale[r] g) + add[r]
 * Integer sums are exact in any order and +, *, / are correctly rounded, so the bits are the same on every instruction
 * set. |q| <= levels: x levels/m is at most levels (1 + 2^-22) before it is rounded to an integer. */

/* panels of int8 weights: float scale [packed rows], then the weights as backends.h lays them out */
INLINE const uint8_t *int8_weights(const cnorm_matrix *w) { return (const uint8_t *)w->panels + 4 * packed_rows(w); }

INLINE int32_t bits_of_f32(float a)
{
    int32_t bits;
    memcpy(&bits, &a, sizeof bits);
    return bits;
}

/* (1): q = round(x to_levels), x is about q from_levels */
typedef struct int8_scale {
    float to_levels, from_levels;
} int8_scale;

/* the largest bits of |x|: their order as integers is that of the numbers; infinity and NaN are INFINITE or above */
enum { INFINITE = 0x7f800000 };
INLINE int32_t largest_bits(ptrdiff_t n, const float *x)
{
    i32v lanes = {0};
    for (ptrdiff_t k = 0; k < n; k += VL_F32) {
        const i32v bits = (i32v)load_first_f32(x + k, n - k) & 0x7fffffff, larger = (i32v)(bits > lanes);
        lanes = (bits & larger) | (lanes & ~larger);
    }
    int32_t largest = 0;
    for (int i = 0; i < VL_F32; ++i) largest = lanes[i] > largest ? lanes[i] : largest;
    return largest;
}

INLINE int8_scale int8_scale_of(ptrdiff_t n, const float *x, int levels)
{
    const int32_t largest = largest_bits(n, x);
    float m;
    memcpy(&m, &largest, sizeof m);
    if (largest >= INFINITE) return (int8_scale){0, (float)NAN};
    if (m < 0x1p-100f) return (int8_scale){0, 0};
    return (int8_scale){(float)levels / m, m / (float)levels};
}

/* rounded to nearest even, for |a| < 2^22 */
INLINE int32_t rounded_to_int(float a) { return bits_of_f32(a + 0x1.8p23f) - bits_of_f32(0x1.8p23f); }
INLINE i32v rounded_to_ints(f32v a) { return (i32v)(a + 0x1.8p23f) - bits_of_f32(0x1.8p23f); }

/* q [4 quads], zero from the n-th on; returns its sum */
INLINE int32_t quantize(ptrdiff_t n, const float *x, int8_scale scale, int16_t *q)
{
    u32v sums = {0};
    uint32_t sum = 0;
    ptrdiff_t k = 0;
    if (scale.to_levels == 0) {
        memset(q, 0, (size_t)n * sizeof *q);
        k = n;
    }
    for (; k + 2 * VL_F32 <= n; k += 2 * VL_F32) {
        const u32v a = (u32v)rounded_to_ints(load_f32(x + k) * scale.to_levels),
                   b = (u32v)rounded_to_ints(load_f32(x + k + VL_F32) * scale.to_levels);
        const u16v both = upper_halves((u16v)(a << 16), (u16v)(b << 16));
        memcpy(q + k, &both, sizeof both);
        sums += a + b;
    }
    for (; k < n; ++k) {
        const int32_t rounded = rounded_to_int(x[k] * scale.to_levels);
        q[k] = (int16_t)rounded;
        sum += (uint32_t)rounded;
    }
    for (; k % 4; ++k) q[k] = 0;
    for (int i = 0; i < VL_F32; ++i) sum += sums[i];
    return (int32_t)sum;
}

/* (3) in place: z holds sums of (w + CNORM_INT8_BIAS) q, as int32 */
static void scaled_sums(const cnorm_matrix *w, int32_t q_sum, float from_levels, const float *add, float *z)
{
    const float *scale = w->panels;
    const u32v bias = (u32v){0} + (uint32_t)q_sum * CNORM_INT8_BIAS;
    for (ptrdiff_t r = 0; r < packed_rows(w); r += PANEL)
        EACH(i, LANE_VECTORS) {
            const ptrdiff_t at = r + i * VL_F32;
            u32v sums; /* modulo 2^32 */
            memcpy(&sums, z + at, sizeof sums);
            const f32v unit = load_f32(scale + at) * splat_f32(from_levels);
            const f32v v = __builtin_convertvector((i32v)(sums - bias), f32v) * unit;
            store_f32(z + at, add ? v + load_f32(add + at) : v);
        }
}

/* sum of squares of z [n], n a multiple of CNORM_GATE_PAD: lanes, the halving tree, float64 every FOLD elements */
INLINE double sum_of_squares(const float *z, ptrdiff_t n)
{
    lane_sum squares = {.total = 0};
    for (ptrdiff_t start = 0; start < n; start += FOLD) {
        const ptrdiff_t end = n - start < FOLD ? n : start + FOLD;
        for (ptrdiff_t j = start; j < end; j += LANES_F32)
            EACH(i, LANE_VECTORS) {
                if (j + i * VL_F32 >= end) break;
                const f32v v = load_f32(z + j + i * VL_F32);
                squares.lanes[i] += v * v;
            }
        fold(&squares);
    }
    return squares.total;
}

typedef struct product_options {
    const float *add; /* vectors that are added to the products, `stride` apart; NULL: none */
    ptrdiff_t stride;
    int backwards; /* with one float vector: the last rows of W first, which the product before has left in a cache */
} product_options;

/* as `products`; scratch [product_scratch_floats] */
static void products_int8(const cnorm_matrix *w, ptrdiff_t n, const float *const *x, product_options options, float *z,
                          ptrdiff_t z_stride, float *scratch)
{
    const ptrdiff_t quads = (w->cols + 3) / 4;
    const cnorm_int8_backend *backend = cnorm_int8_backend_of(VECTOR_BYTES);
    int32_t(*arranged)[2] = (void *)scratch, q_sum[CNORM_ROWS];
    int16_t *q = (void *)(scratch + 2 * quads * n);
    float from_levels[CNORM_ROWS];
    for (ptrdiff_t s = 0; s < n; ++s) {
        const int8_scale scale = int8_scale_of(w->cols, x[s], w->levels);
        q_sum[s] = quantize(w->cols, x[s], scale, q);
        from_levels[s] = scale.from_levels;
        backend->arrange(quads, q, n, arranged + s);
    }
    backend->multiply(packed_rows(w), quads, int8_weights(w), n, (const int32_t(*)[2])arranged, (int32_t *)(void *)z,
                      z_stride);
    for (ptrdiff_t s = 0; s < n; ++s)
        scaled_sums(w, q_sum[s], from_levels[s], options.add ? options.add + s * options.stride : NULL,
                    z + s * z_stride);
}
