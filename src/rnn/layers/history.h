/* Frames of earlier steps, which are the state of a layer: its windows have the frames of `taps` steps, the oldest
 * first, `dilation` steps apart, the last one that of the step itself. */
#ifndef CNORM_HISTORY_H
#define CNORM_HISTORY_H

#include "../layers.h"

typedef struct history {
    ptrdiff_t floats, taps, dilation; /* of a frame; of a window */
} history;

#pragma GCC visibility push(hidden)

void cnorm_history_windows(history of, const float *state, ptrdiff_t n, const_rows x, float_rows windows);
void cnorm_history_append(history of, float *state, ptrdiff_t n, const_rows x);
void cnorm_history_backward_start(history of, ptrdiff_t steps, const float *dstate, float *frames);
void cnorm_history_backward_add(const cnorm_kernels *kernels, history of, ptrdiff_t step, const float *window,
                                float *frames);
void cnorm_history_backward_end(history of, ptrdiff_t steps, const float *frames, float *dstate, float_rows dx);

#pragma GCC visibility pop

/* the frames of the state */
static inline ptrdiff_t kept_frames(history of) { return (of.taps - 1) * of.dilation; }

#endif
