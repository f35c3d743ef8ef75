/* Batch norm of half types. A strip of channels is widened to float32 in scratch, computed there in place by the
 * float32 kernel, and rounded. A channel's result depends on no other channel, so the width of a strip changes no
 * bit. An instance of batch_norm.inl.h for each half type would add 50 KB of code per instruction set. */

/* rows x [n], `stride` elements apart, widened to y [rows, n], contiguous, and back */
static NOINLINE void FN(widen_rows)(ptrdiff_t rows, ptrdiff_t n, const X *x, ptrdiff_t stride, T *y)
{
    for (; rows; --rows, x += stride, y += n) {
        ptrdiff_t j = 0;
        for (; j + VL <= n; j += VL) TN(store)(y + j, FN(load)(x + j));
        if (j < n) FN(put_T)(y + j, 0, n - j, FN(take)(x + j, 0, n - j));
    }
}
static NOINLINE void FN(narrow_rows)(ptrdiff_t rows, ptrdiff_t n, const T *x, X *y, ptrdiff_t stride)
{
    for (; rows; --rows, x += n, y += stride)
        for (ptrdiff_t j = 0; j < n; j += VL) {
            const ptrdiff_t to = n - j < VL ? n - j : VL;
            FN(put)(y + j, 0, to, FN(take_T)(x + j, 0, to), NULL);
        }
}

static void FN(to_float)(const cnorm_conversion *call) { FN(widen_rows)(1, call->n, call->x, 0, call->y); }

INLINE const T *FN(from_channel)(const T *param, ptrdiff_t c) { return param ? param + c : NULL; }

/* a call in strips, each computed by `in_T` */
static NOINLINE void FN(in_strips)(const cnorm_volume_norm *call, void (*in_T)(const cnorm_volume_norm *))
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
        part.gain = FN(from_channel)(call->gain, c), part.bias = FN(from_channel)(call->bias, c);
        part.mean = FN(from_channel)(call->mean, c), part.var = FN(from_channel)(call->var, c);
        part.stats = call->stats ? (T *)call->stats + 3 * c : NULL;
        part.moments = call->moments ? moments : NULL;
        part.scratch = strip.scratch;
        part.hints &= ~NT_STORES;
        FN(widen_rows)(call->samples, n, (const X *)call->x + at, call->x_stride, strip.x);
        in_T(&part);
        FN(narrow_rows)(call->samples, n, strip.x, (X *)call->y + at, call->y_stride);
        if (!call->moments) continue;
        memcpy(call->moments + c, moments, (size_t)channels * sizeof *moments);
        memcpy(call->moments + call->channels + c, moments + channels, (size_t)channels * sizeof *moments);
    }
}

static NOINLINE void FN(backward_in_strips)(const cnorm_volume_norm_backward *call,
                                            void (*in_T)(const cnorm_volume_norm_backward *))
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
        part.gain = FN(from_channel)(call->gain, c);
        part.mean = FN(from_channel)(call->mean, c), part.var = FN(from_channel)(call->var, c);
        part.stats = FN(from_channel)(call->stats, 3 * c);
        part.dgain = (T *)call->dgain + c, part.dbias = (T *)call->dbias + c;
        part.scratch = strip.scratch;
        part.hints &= ~NT_STORES;
        FN(widen_rows)(call->samples, n, (const X *)call->x + at, call->x_stride, strip.x);
        FN(widen_rows)(call->samples, n, (const X *)call->dy + at, call->dy_stride, strip.dy);
        in_T(&part);
        FN(narrow_rows)(call->samples, n, strip.dy, (X *)call->dx + at, call->dx_stride);
    }
}

static void FN(batch_norm)(const cnorm_volume_norm *call) { FN(in_strips)(call, batch_norm_f32); }
static void FN(batch_norm_inference)(const cnorm_volume_norm *call) { FN(in_strips)(call, batch_norm_inference_f32); }
static void FN(batch_norm_backward)(const cnorm_volume_norm_backward *call)
{
    FN(backward_in_strips)(call, batch_norm_backward_f32);
}
static void FN(batch_norm_inference_backward)(const cnorm_volume_norm_backward *call)
{
    FN(backward_in_strips)(call, batch_norm_inference_backward_f32);
}
