/* A depthwise convolution: for each channel c
 *   (1) taps in blocks of 16: block = the products kernel[t, c] x[t, c], added in order of t
 *   (2) y[c] = the blocks, added in order, + bias[c] */

enum { CHAINS = 4 }; /* vectors of channels at a time, whose additions do not wait for one another */

/* kernel[t] x[t] of the vector of channels from c on; `whole`, a constant: all of its channels exist */
INLINE f32v tap_product(const cnorm_conv *conv, const cnorm_tap_rows *x, ptrdiff_t t, ptrdiff_t c, int whole)
{
    const ptrdiff_t n = conv->channels, width = padded_units(n);
    const float *row = t < x->kept ? x->state + t * x->state_stride : x->x + (t - x->kept) * x->x_stride;
    return load_f32(conv->kernel + t * width + c) * (whole ? load_f32(row + c) : load_first_f32(row + c, n - c));
}

/* (1) for the taps from t on and `count` vectors of channels from c on. `count` is a constant: CHAINS, or one */
INLINE void tap_block(const cnorm_conv *conv, const cnorm_tap_rows *x, ptrdiff_t t, ptrdiff_t c, int count,
                      f32v block[CHAINS])
{
    const ptrdiff_t end = t + BLOCK < conv->taps ? t + BLOCK : conv->taps;
    EACH(i, count) block[i] = tap_product(conv, x, t, c + i * VL_F32, count > 1);
    for (++t; t < end; ++t)
        EACH(i, count) block[i] += tap_product(conv, x, t, c + i * VL_F32, count > 1);
}

INLINE void depthwise_vectors(const cnorm_conv *conv, const cnorm_tap_rows *x, ptrdiff_t c, int count, float *y)
{
    f32v total[CHAINS], block[CHAINS];
    tap_block(conv, x, 0, c, count, total);
    for (ptrdiff_t t = BLOCK; t < conv->taps; t += BLOCK) {
        tap_block(conv, x, t, c, count, block);
        for (int i = 0; i < count; ++i) total[i] += block[i];
    }
    for (int i = 0; i < count; ++i) {
        const ptrdiff_t at = c + i * VL_F32, left = conv->channels - at;
        if (conv->bias) total[i] += load_first_f32(conv->bias + at, left);
        store_first_f32(y + at, left, total[i]);
    }
}

static void depthwise(const cnorm_conv *conv, const cnorm_tap_rows *x, float *y)
{
    ptrdiff_t c = 0;
    for (; c + CHAINS * VL_F32 <= conv->channels; c += CHAINS * VL_F32) depthwise_vectors(conv, x, c, CHAINS, y);
    for (; c < conv->channels; c += VL_F32) depthwise_vectors(conv, x, c, 1, y);
}
