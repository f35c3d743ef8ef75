/* Batch norm of half types. A strip of channels is widened to float32 in scratch, computed there in place by the
 * float32 kernel, and rounded. A channel's result depends on no other channel, so the width of a strip changes no
 * bit. An instance of batch_norm.inl.h for each half type would add 50 KB of code per instruction set. */

/* rows x [n], `stride` elements apart, widened to y [rows, n], contiguous */
#define WIDEN_ROWS(type)                                                                                               \
    static NOINLINE void widen_rows_##type(ptrdiff_t rows, ptrdiff_t n, const uint16_t *x, ptrdiff_t stride, float *y) \
    {                                                                                                                  \
        for (; rows; --rows, x += stride, y += n) to_float_##type(&(cnorm_conversion){n, x, y});                       \
    }                                                                                                                  \
    static NOINLINE void narrow_rows_##type(ptrdiff_t rows, ptrdiff_t n, const float *x, uint16_t *y,                  \
                                            ptrdiff_t stride)                                                          \
    {                                                                                                                  \
        for (; rows; --rows, x += n, y += stride)                                                                      \
            for (ptrdiff_t j = 0; j < n; j += VL_F32) {                                                                \
                const ptrdiff_t to = n - j < VL_F32 ? n - j : VL_F32;                                                  \
                if (to == VL_F32) store_##type(y + j, load_f32(x + j));                                                \
                else store_range_##type(y + j, 0, to, load_range_f32(x + j, 0, to, splat_f32(0)));                     \
            }                                                                                                          \
    }
WIDEN_ROWS(f16)
WIDEN_ROWS(bf16)
#undef WIDEN_ROWS

static void widen_rows(cnorm_dtype storage, ptrdiff_t rows, ptrdiff_t n, const uint16_t *x, ptrdiff_t stride, float *y)
{
    if (storage == CNORM_F16) widen_rows_f16(rows, n, x, stride, y);
    else widen_rows_bf16(rows, n, x, stride, y);
}

static void narrow_rows(cnorm_dtype storage, ptrdiff_t rows, ptrdiff_t n, const float *x, uint16_t *y, ptrdiff_t stride)
{
    if (storage == CNORM_F16) narrow_rows_f16(rows, n, x, y, stride);
    else narrow_rows_bf16(rows, n, x, y, stride);
}

static const float *from_channel(const float *param, ptrdiff_t c) { return param ? param + c : NULL; }

static NOINLINE void batch_norm_half(cnorm_dtype storage, const cnorm_volume_norm *call, int inference)
{
    const cnorm_batch_strip strip = batch_strip(call->scratch, call->samples, call->channels, call->space);
    for (ptrdiff_t c = 0; c < call->channels; c += strip.channels) {
        const ptrdiff_t channels = call->channels - c < strip.channels ? call->channels - c : strip.channels;
        const ptrdiff_t at = c * call->space, n = channels * call->space;
        double moments[2 * CNORM_STRIP];
        cnorm_volume_norm part = *call;
        part.channels = channels;
        part.x = part.y = strip.x;
        part.x_stride = part.y_stride = n;
        part.gain = from_channel(call->gain, c), part.bias = from_channel(call->bias, c);
        part.mean = from_channel(call->mean, c), part.var = from_channel(call->var, c);
        part.stats = call->stats ? (float *)call->stats + 3 * c : NULL;
        part.moments = call->moments ? moments : NULL;
        part.scratch = strip.scratch;
        part.hints &= ~STREAMING;
        widen_rows(storage, call->samples, n, (const uint16_t *)call->x + at, call->x_stride, strip.x);
        if (inference) batch_norm_inference_f32(&part);
        else batch_norm_f32(&part);
        narrow_rows(storage, call->samples, n, strip.x, (uint16_t *)call->y + at, call->y_stride);
        if (!call->moments) continue;
        memcpy(call->moments + c, moments, (size_t)channels * sizeof(double));
        memcpy(call->moments + call->channels + c, moments + channels, (size_t)channels * sizeof(double));
    }
}

static NOINLINE void batch_norm_backward_half(cnorm_dtype storage, const cnorm_volume_norm_backward *call,
                                              int inference)
{
    const cnorm_batch_strip strip = batch_strip(call->scratch, call->samples, call->channels, call->space);
    for (ptrdiff_t c = 0; c < call->channels; c += strip.channels) {
        const ptrdiff_t channels = call->channels - c < strip.channels ? call->channels - c : strip.channels;
        const ptrdiff_t at = c * call->space, n = channels * call->space;
        cnorm_volume_norm_backward part = *call;
        part.channels = channels;
        part.dy = part.dx = strip.dy;
        part.x = strip.x;
        part.dy_stride = part.x_stride = part.dx_stride = n;
        part.gain = from_channel(call->gain, c);
        part.mean = from_channel(call->mean, c), part.var = from_channel(call->var, c);
        part.stats = from_channel(call->stats, 3 * c);
        part.dgain = (float *)call->dgain + c, part.dbias = (float *)call->dbias + c;
        part.scratch = strip.scratch;
        part.hints &= ~STREAMING;
        widen_rows(storage, call->samples, n, (const uint16_t *)call->x + at, call->x_stride, strip.x);
        widen_rows(storage, call->samples, n, (const uint16_t *)call->dy + at, call->dy_stride, strip.dy);
        if (inference) batch_norm_inference_backward_f32(&part);
        else batch_norm_backward_f32(&part);
        narrow_rows(storage, call->samples, n, strip.dy, (uint16_t *)call->dx + at, call->dx_stride);
    }
}

#define ENTRY(name, body, call_type, inference)                                                                        \
    static void name##_f16(const call_type *call) { body(CNORM_F16, call, inference); }                                \
    static void name##_bf16(const call_type *call) { body(CNORM_BF16, call, inference); }
ENTRY(batch_norm, batch_norm_half, cnorm_volume_norm, 0)
ENTRY(batch_norm_inference, batch_norm_half, cnorm_volume_norm, 1)
ENTRY(batch_norm_backward, batch_norm_backward_half, cnorm_volume_norm_backward, 0)
ENTRY(batch_norm_inference_backward, batch_norm_backward_half, cnorm_volume_norm_backward, 1)
#undef ENTRY
