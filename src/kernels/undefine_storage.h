/* Ends the use of one storage type; see isa.inl.h. */
#undef X
#undef DTYPE
#undef FN
