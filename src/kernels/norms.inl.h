/* The norms of one storage type X, which is undefined at the end. Those of half types that are not here are computed by
 * those of float32. */
#include "sink.inl.h"
#include "sweep.inl.h"
#include "row_stats.inl.h"
#include "layer_norm.inl.h"
#include "layer_norm_backward.inl.h"
#include "channel_run.inl.h"
#include "group_norm.inl.h"
#ifdef HALF_TYPE
#include "batch_norm_half.inl.h"
#else
#include "batch_norm.inl.h"
#include "batch_norm_backward.inl.h"
#include "batch_norm_inference.inl.h"
#include "weight_norm.inl.h"
#include "smoothing_gradient.inl.h"
#include "divisive_norm.inl.h"
#endif
#undef X
#undef DTYPE
#undef FN
