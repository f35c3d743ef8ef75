/* The frames that a layer keeps as its state [kept_frames, floats], the oldest first; windows of them, and the
 * gradients of the frames in windows. */
#include "history.h"

#include <string.h>

/* the windows [taps, floats] of n frames x of one stream, whose state is not changed */
void cnorm_history_windows(history of, const float *state, ptrdiff_t n, const_rows x, float_rows windows)
{
    const ptrdiff_t before = kept_frames(of);
    for (ptrdiff_t s = 0; s < n; ++s)
        for (ptrdiff_t t = 0; t < of.taps; ++t) {
            const ptrdiff_t frame = s + t * of.dilation; /* of the state, then of x */
            const float *from = frame < before ? state + frame * of.floats : x.at + (frame - before) * x.stride;
            memcpy(windows.at + s * windows.stride + t * of.floats, from, (size_t)of.floats * sizeof *from);
        }
}

/* appends n frames to the state and drops the oldest */
void cnorm_history_append(history of, float *state, ptrdiff_t n, const_rows x)
{
    const ptrdiff_t before = kept_frames(of), taken = n < before ? n : before;
    if (taken == 0) return;
    memmove(state, state + taken * of.floats, (size_t)((before - taken) * of.floats) * sizeof *state);
    for (ptrdiff_t s = 0; s < taken; ++s)
        memcpy(state + (before - taken + s) * of.floats, x.at + (n - taken + s) * x.stride,
               (size_t)of.floats * sizeof *state);
}

/* The gradients of the frames [kept_frames + steps, floats] of one stream begin with those of its state after the
 * steps. Then each window's are added, from the last step to the first. */
void cnorm_history_backward_start(history of, ptrdiff_t steps, const float *dstate, float *frames)
{
    const ptrdiff_t before = kept_frames(of) * of.floats, ahead = steps * of.floats;
    memset(frames, 0, (size_t)(before + ahead) * sizeof *frames);
    if (before > 0) memcpy(frames + ahead, dstate, (size_t)before * sizeof *frames);
}

void cnorm_history_backward_add(const cnorm_kernels *kernels, history of, ptrdiff_t step, const float *window,
                                float *frames)
{
    for (ptrdiff_t t = 0; t < of.taps; ++t)
        kernels->add_f32(of.floats, frames + (step + t * of.dilation) * of.floats, window + t * of.floats);
}

/* dstate: that of the state before the steps; dx [steps], unless its `at` is NULL */
void cnorm_history_backward_end(history of, ptrdiff_t steps, const float *frames, float *dstate, float_rows dx)
{
    const ptrdiff_t before = kept_frames(of) * of.floats;
    if (before > 0) memcpy(dstate, frames, (size_t)before * sizeof *frames);
    for (ptrdiff_t s = 0; dx.at && s < steps; ++s)
        memcpy(dx.at + s * dx.stride, frames + before + s * of.floats, (size_t)of.floats * sizeof *frames);
}
