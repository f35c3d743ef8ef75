/* The loop over panels and vectors that all backends share. Before including this, a backend defines
 *     panel_sums(panel, quads, count, x, n, sums, stride): sums [count, PANEL] of one panel, count a constant 1, 2 or 4
 *     arrange, as backends.h has it */
static void multiply(ptrdiff_t rows, ptrdiff_t quads, const uint8_t *weights, ptrdiff_t n, const int32_t (*x)[2],
                     int32_t *sums, ptrdiff_t stride)
{
    for (ptrdiff_t r = 0; r < rows; r += CNORM_INT8_PANEL) {
        const uint8_t *panel = weights + r * quads * 4;
        ptrdiff_t s = 0;
        if (n == 1) panel_sums(panel, quads, 1, x, 1, sums + r, stride);
        if (n == 1) continue;
        for (; s + 4 <= n; s += 4) panel_sums(panel, quads, 4, x + s, n, sums + s * stride + r, stride);
        for (; s + 2 <= n; s += 2) panel_sums(panel, quads, 2, x + s, n, sums + s * stride + r, stride);
        for (; s < n; ++s) panel_sums(panel, quads, 1, x + s, n, sums + s * stride + r, stride);
    }
}

/* without designators: amalgamate.py renames the functions, and would rename the members */
#define BACKEND_OF(backend) const cnorm_int8_backend cnorm_int8_##backend = {#backend, arrange, multiply}
