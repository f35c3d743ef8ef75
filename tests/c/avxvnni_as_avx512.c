#define cnorm_int8_avxvnni cnorm_int8_avxvnni_as_avx512
#include "int8/avxvnni.c"
