/* The norms of every storage type X. They are included in the order in which they call one another. */
#include "sink.inl.h"
#include "sweep.inl.h"
#include "row_stats.inl.h"
#include "layer_norm.inl.h"
#include "layer_norm_backward.inl.h"
#include "channel_run.inl.h"
#include "group_norm.inl.h"
