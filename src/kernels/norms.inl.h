/* The norms of float32 and float64 */
#include "row_norms.inl.h"
#include "batch_norm.inl.h"
#include "batch_norm_backward.inl.h"
#include "batch_norm_inference.inl.h"
#include "weight_norm.inl.h"
#include "smoothing_gradient.inl.h"
#include "divisive_norm.inl.h"
