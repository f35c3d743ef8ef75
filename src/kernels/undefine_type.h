/* Ends the use of one compute type; see isa.inl.h. */
#undef T
#undef V
#undef TN
#undef Q_MAX
#undef Q_MIN
#undef RSTD_MIN
#undef RSTD_MAX
#undef SUM_MAX
