/* Tiny numbers in weights and frames: no product reads or makes a subnormal number, which costs a microcode assist on
 * some processors. x86 has a flag for each. */
#include "network.h"

#if defined(__SSE2__)
#include <immintrin.h>

enum { FRAMES = 19, INPUTS = 100, UNITS = 70, FLAGS = 0x12 /* of MXCSR: a subnormal operand, underflow */ };

static double tiny_power(uint64_t *seed, int lowest, int highest)
{
    return ldexp(1, lowest + (int)(random_bits(seed) % (uint64_t)(highest - lowest + 1)));
}

static void fill(int family, float *x)
{
    uint64_t seed = 7;
    for (int i = 0; i < FRAMES * INPUTS; ++i) {
        const double v = bell(&seed);
        switch (family) {
        case 0: x[i] = (float)ldexp(v, -120); break;
        case 1: x[i] = (float)ldexp(v, -135); break;
        case 2: x[i] = (float)(i % 3 ? v : ldexp(v, -140)); break;
        case 3: x[i] = (float)ldexp(v, -7 * (i / INPUTS)); break;
        case 4: x[i] = (float)(tiny_power(&seed, -149, 0) * (v < 0 ? -1 : 1)); break;
        default: x[i] = (float)(tiny_power(&seed, -149, 120) * (v < 0 ? -1 : 1));
        }
    }
}

int main(void)
{
    uint64_t seed = 1;
    network memory = {.units = UNITS};
    float *w = network_random(&memory, allocate, UNITS * INPUTS, 0, 0.1, &seed);
    for (int i = 0; i < UNITS * INPUTS; i += 7) w[i] *= (float)tiny_power(&seed, -140, -70);
    const cnorm_linear linear = {.weight = network_pack(&memory, allocate, 1, UNITS, INPUTS, 0, w)};
    const cnorm_layer layer = {.kind = CNORM_LAYER_LINEAR, .as = {.linear = linear}};
    float *x = network_floats(&memory, allocate, FRAMES * INPUTS), *y = network_floats(&memory, allocate, FRAMES * UNITS);
    float *scratch = network_floats(&memory, allocate, cnorm_scratch_floats(&layer, 1, FRAMES));
    for (int family = 0; family < 6; ++family) {
        fill(family, x);
        FOR_EACH_ISA(isa)
            for (int rows = 1; rows <= FRAMES; rows += FRAMES - 1) {
                if (isa == 0) continue; /* its fma is computed in float64 */
                _mm_setcsr(_mm_getcsr() & ~0x3fu);
                CHECK(cnorm_run(&(cnorm_frames){.layers = &layer, .count = 1, .frames = FRAMES, .x = x, .scratch = scratch,
                    .rows = rows, .y = y}) == CNORM_OK, "family %d", family);
                CHECK((_mm_getcsr() & FLAGS) == 0, "family %d, %d rows on %s: flags %#x", family, rows, cnorm_isa_name(isa),
                      _mm_getcsr());
            }
    }
    network_free(&memory);
    return check_result();
}
#else
int main(void)
{
    printf("no flag of subnormal operands here: nothing is tested\n");
    return 0;
}
#endif
