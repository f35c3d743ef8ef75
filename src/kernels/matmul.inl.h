/* Products of a packed matrix with several vectors, by the sums of matvec.inl.h: the same bits for each vector. The
 * weights are read once: a strip of two vectors of lanes, which stays in the caches, serves all vectors before the next
 * is read. */

enum {
    MANY = VECTOR_BYTES == 64 ? 8 : 4, /* vectors at a time: two blocks and sums of each must fit in registers */
    FEW = 4 /* vectors that are read where they are, since their addresses fit in registers; more are interleaved */
};

/* AVX-512 multiplies by a float that it broadcasts from memory as fast as by a register. If two products share the
 * broadcast, it becomes an instruction of its own (10.7 instead of 16 multiply-adds a cycle, Zen 4, 2026-11-21). A
 * second index, which the compiler can't know to be equal, prevents the sharing. */
#if VECTOR_BYTES == 64
#define ANOTHER(index) __asm__("" : "+r"(index))
/* A vector of weights is loaded once; GCC loads it again in each multiply-add, which takes two streams of an LSTM
 * 64 -> 128 1.1 times as long (Zen 4, 2026-11-26). */
#define IN_REGISTER(vector) __asm__("" : "+v"(vector))
#else
#define ANOTHER(index) ((void)(index))
#define IN_REGISTER(vector) ((void)(vector))
#endif

/* to [cols, count] = x [count][cols] transposed; count is a multiple of 4 */
static void interleave(ptrdiff_t cols, int count, const float *const *x, float *to)
{
    ptrdiff_t k = 0;
    for (; k + 4 <= cols; k += 4)
        for (int s = 0; s < count; s += 4) {
            f32x4 r[4];
            EACH(i, 4) memcpy(r + i, x[s + i] + k, sizeof *r);
            transpose_4(r);
            EACH(i, 4) memcpy(to + (k + i) * count + s, r + i, sizeof *r);
        }
    for (; k < cols; ++k)
        for (int s = 0; s < count; ++s) to[k * count + s] = x[s][k];
}

/* A product with several vectors */
typedef struct product_call {
    const cnorm_matrix *w;
    const float *const *x;
    const float *xt; /* the vectors of groups of more than FEW: groups [cols, count], one behind the other */
    addends add;
    float *z; /* [vectors, packed rows] */
    ptrdiff_t z_stride;
} product_call;

/* z = W x + add for the rows of W from r on that `width` vectors hold, at most 4, and the `count` vectors from `first`
 * on; half, width and count are constants */
INLINE void product_strip(const product_call *call, int half, int width, int count, ptrdiff_t r, ptrdiff_t first)
{
    const cnorm_matrix *w = call->w;
    const ptrdiff_t cols = w->cols;
    enum { PER = PANEL / VL_F32 }; /* vectors of a panel */
    const int step = count > FEW ? count : 1, sums = width * count;
    const float *x[FEW], *xt = call->xt + first * cols; /* one address for all: their own would not fit in registers */
    for (int s = 0; s < FEW && s < count; ++s) x[s] = call->x[first + s];
    ptrdiff_t at = r / PANEL * PANEL * cols + r % PANEL, i = 0, i2 = 0;
    if (count > 2) ANOTHER(i2); /* two vectors are limited by loads, which sharing saves */
    f32v sum[2 * MANY] = {{0}};
    for (ptrdiff_t k = 0; k < cols; k += BLOCK) {
        const ptrdiff_t end = (cols - k < BLOCK ? cols : k + BLOCK) * step;
        f32v block[2 * MANY] = {{0}};
        for (; i < end; i += step, i2 += step, at += PANEL) {
            f32v weights[4];
            EACH(v, width) {
                weights[v] = load_weights(w->panels, at + v / PER * PANEL * cols + v % PER * VL_F32, half);
                if (count == 2) IN_REGISTER(weights[v]);
            }
            EACH(j, sums) {
                const ptrdiff_t s = j / width, in = j % width ? i2 : i;
                block[j] = fma_f32(weights[j % width], splat_f32(count > FEW ? xt[in + s] : x[s][in]), block[j]);
            }
        }
        add_block_f32(sums, sum, block);
    }
    EACH(j, sums) {
        const ptrdiff_t s = first + j / width, to = r + j % width * VL_F32;
        if (call->add.rows) sum[j] += load_f32(call->add.rows + s * call->add.stride + to);
        store_f32(call->z + s * call->z_stride + to, sum[j]);
    }
}

/* how many of `left` vectors, an even number, go through a strip together */
INLINE int together(ptrdiff_t left) { return left >= MANY ? MANY : left >= 4 ? 4 : 2; }

INLINE void strip_products(const product_call *call, int half, int width, ptrdiff_t r, ptrdiff_t n)
{
    for (ptrdiff_t s = 0; s < n; s += together(n - s)) {
        const int count = together(n - s);
        if (count == MANY) product_strip(call, half, width, MANY, r, s);
        else if (count == 4) product_strip(call, half, width, 4, r, s);
        else product_strip(call, half, width, 2, r, s);
    }
}

/* Strips of two vectors; a last one may have one, since rows are padded to CNORM_GATE_PAD. Of four for two streams, as
 * four sums wait for each other: 12 to 17 % faster, with AVX2 15 to 30 % (Zen 4, 2026-11-26). */
INLINE void product_strips(const product_call *call, int half, ptrdiff_t n)
{
    const ptrdiff_t rows = used_rows(call->w);
    ptrdiff_t r = 0;
    for (; n == 2 && r + 4 * VL_F32 <= rows; r += 4 * VL_F32) product_strip(call, half, 4, 2, r, 0);
    for (; r + 2 * VL_F32 <= rows; r += 2 * VL_F32) strip_products(call, half, 2, r, n);
    if (VECTOR_BYTES == 64 && r < rows) strip_products(call, half, 1, r, n);
    for (r = rows; r < packed_rows(call->w); r += VL_F32) /* zeros, which a sum of squares may include */
        for (ptrdiff_t s = 0; s < n; ++s) store_f32(call->z + s * call->z_stride + r, splat_f32(0));
}

/* products of float32 or float16 weights; scratch [interleaved_floats] */
static double products_of(const cnorm_matrix *w, ptrdiff_t n, const float *const *x, addends add, float *z,
                          ptrdiff_t z_stride, float *scratch)
{
    if (n == 1) return product(w, x[0], add.rows, z);
    const ptrdiff_t even = n / 2 * 2;
    const product_call call = {w, x, scratch, add, z, z_stride};
    for (ptrdiff_t s = 0; s < even && together(even - s) > FEW; s += together(even - s))
        interleave(w->cols, together(even - s), x + s, scratch + s * w->cols);
    if (w->type == CNORM_WEIGHT_F16) product_strips(&call, 1, even);
    else product_strips(&call, 0, even);
    if (even < n) (void)product(w, x[even], add.rows ? add.rows + even * add.stride : NULL, z + even * z_stride);
    return -1;
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
RARE void products_floored(const cnorm_matrix *w, ptrdiff_t n, const float *const *x, addends add, float *z,
                           ptrdiff_t z_stride, float *scratch)
{
    const float *rows[CNORM_ROWS] = {NULL};
    float *copies = scratch + interleaved_floats(w, n);
    double units[CNORM_ROWS];
    for (ptrdiff_t s = 0; s < n; ++s) {
        rows[s] = copies + s * w->cols;
        units[s] = floored(w->cols, x[s], copies + s * w->cols);
    }
    (void)products_of(w, n, rows, (addends){NULL, 0}, z, z_stride, scratch);
    for (ptrdiff_t s = 0; s < n; ++s)
        for (ptrdiff_t r = 0; r < packed_rows(w); ++r) {
            float *to = z + s * z_stride + r;
            if (units[s] != 1) *to = (float)or_zero((double)*to * units[s], 0x1p-126);
            if (add.rows) *to += add.rows[s * add.stride + r];
        }
}

/* z [n, packed rows] = W x + add for n <= CNORM_ROWS vectors; scratch [product_scratch_floats]. Returns the sum of
 * squares of z, or -1 where it is not known. A subnormal operand or result may take 50 times as long (Intel), so
 * tiny vectors are multiplied in units of their largest. */
static double products(const cnorm_matrix *w, ptrdiff_t n, const float *const *x, addends add, float *z,
                       ptrdiff_t z_stride, float *scratch)
{
    if (w->type == CNORM_WEIGHT_I8) return products_int8(w, n, x, add, z, z_stride, scratch);
    for (ptrdiff_t s = 0; s < n; ++s) {
        if (!is_tiny(w->cols, x[s])) continue;
        products_floored(w, n, x, add, z, z_stride, scratch);
        return -1;
    }
    return products_of(w, n, x, add, z, z_stride, scratch);
}
