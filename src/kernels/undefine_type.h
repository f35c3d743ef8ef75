/* Ends one inclusion of a body per element type; see isa.inl.h. */
#undef T
#undef V
#undef VL
#undef LANES
#undef FN
#undef Q_MAX
#undef Q_MIN
#undef RSTD_MIN
#undef RSTD_MAX
#undef RSTD_TINY
#undef RSTD_HUGE
#undef RESCUE_SCALE
