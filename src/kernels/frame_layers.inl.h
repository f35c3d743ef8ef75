/* Layers of frames [channels, positions] with the positions in lanes: products, depthwise sums and prelu. Whole vectors
 * are stored, but at the end of y: what they overwrite behind a row's end is stored later. */

INLINE void product_rows(const cnorm_frame_view *x, const cnorm_linear *layer, int count, ptrdiff_t r, ptrdiff_t p,
                         float *y)
{
    const ptrdiff_t rows = layer->weight.units, end = rows * x->places;
    const int sums = FRAME_ROWS * count;
    f32v sum[FRAME_ROWS * FRAME_VECTORS];
    frame_sums(x, &layer->weight, count, r, p, sum);
    EACH(k, sums) {
        const int i = k % FRAME_ROWS, at = i * count + count - 1 - k / FRAME_ROWS; /* the last vectors first */
        if (r + i >= rows) continue;
        const ptrdiff_t to = (r + i) * x->places + p + at % count * VL_F32;
        store_first_f32(y + to, end - to, layer->bias ? sum[at] + splat_f32(layer->bias[r + i]) : sum[at]);
    }
}

/* y [units, places] = W x + bias */
static void frame_product(const cnorm_frame_view *x, const cnorm_linear *layer, float *y)
{
    for (ptrdiff_t r = 0; r < layer->weight.units; r += FRAME_ROWS)
        for (ptrdiff_t v = (x->places + VL_F32 - 1) / VL_F32, count; v > 0; v -= count) {
            count = v % FRAME_VECTORS ? v % FRAME_VECTORS : FRAME_VECTORS;
            const ptrdiff_t p = (v - count) * VL_F32;
            if (count == 3) product_rows(x, layer, 3, r, p, y);
            else if (count == 2) product_rows(x, layer, 2, r, p, y);
            else product_rows(x, layer, 1, r, p, y);
        }
}

/* y [channels, places]: the sums of depthwise.inl.h */
static void frame_depthwise(const cnorm_frame_view *x, const cnorm_conv *conv, float *y)
{
    const ptrdiff_t width = padded_units(conv->channels), places = x->places, end = conv->channels * places;
    for (ptrdiff_t c = 0; c < conv->channels; ++c)
        for (ptrdiff_t p = (places - 1) / VL_F32 * VL_F32; p >= 0; p -= VL_F32) {
            f32v total = {0}, block = {0};
            for (ptrdiff_t t = 0; t < conv->taps; ++t) {
                const f32v v = splat_f32(conv->kernel[t * width + c]) * load_f32(x->at + x->offset[t] + c * x->row + p);
                if (t > 0 && t % BLOCK == 0) total = t == BLOCK ? block : total + block;
                block = t % BLOCK ? block + v : v;
            }
            if (conv->taps > BLOCK) block = total + block;
            if (conv->bias) block += splat_f32(conv->bias[c]);
            store_first_f32(y + c * places + p, end - c * places - p, block);
        }
}

static void pad_frame(ptrdiff_t channels, ptrdiff_t positions, const float *x, ptrdiff_t before, ptrdiff_t row,
                      float *y)
{
    const ptrdiff_t whole = (positions + VL_F32 - 1) / VL_F32 * VL_F32;
    for (ptrdiff_t c = 0; c < channels; ++c, x += positions, y += row) {
        for (ptrdiff_t p = 0; p < before; p += VL_F32) store_f32(y + p, splat_f32(0));
        for (ptrdiff_t p = 0; p < positions; p += VL_F32)
            store_f32(y + before + p, load_first_f32(x + p, positions - p));
        for (ptrdiff_t p = before + whole; p < row; p += VL_F32) store_f32(y + p, splat_f32(0));
    }
}

/* y [n] = x, or slope x where x < 0; y may be x */
static void prelu(ptrdiff_t n, const float *slope, const float *x, float *y)
{
    for (ptrdiff_t i = 0; i < n; i += VL_F32) {
        const f32v v = load_first_f32(x + i, n - i), s = load_first_f32(slope + i, n - i);
        store_first_f32(y + i, n - i, select_f32((i32v)(v < splat_f32(0)), s * v, v));
    }
}
