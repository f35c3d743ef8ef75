/* Packing matrices: the weights are centred in float64, rounded once to their type, and laid out in panels. */
#include <math.h>
#include <string.h>

#include "../float_mode.h"
#include "../int8/backends.h"
#include "../kernels/kernels.h"

_Static_assert((int)CNORM_INT8_PANEL == (int)PANEL, "one panel for all types");

ptrdiff_t cnorm_padded_units(ptrdiff_t units) { return padded_units(units); }

ptrdiff_t cnorm_matrix_floats(ptrdiff_t gates, ptrdiff_t units, ptrdiff_t cols)
{
    const ptrdiff_t limit = (ptrdiff_t)1 << 28; /* keeps the product below far from UINT64_MAX */
    if (gates <= 0 || units <= 0 || cols <= 0 || gates > 64 || units > limit || cols > limit) return 0;
    const uint64_t rows = (uint64_t)gates * ((uint64_t)units + CNORM_GATE_PAD) + PANEL; /* at least packed_rows */
    if (rows * ((uint64_t)cols + 4) > PTRDIFF_MAX / sizeof(float)) return 0;
    const cnorm_matrix shape = {.gates = gates, .units = units, .cols = cols};
    return packed_rows(&shape) * cols;
}

ptrdiff_t cnorm_matrix_bytes(const cnorm_matrix *matrix)
{
    const ptrdiff_t floats = cnorm_matrix_floats(matrix->gates, matrix->units, matrix->cols);
    if (floats == 0) return 0;
    switch (matrix->type) { /* without `default`, here and below: -Werror=switch names a new type */
    case CNORM_WEIGHT_F32: return 4 * floats;
    case CNORM_WEIGHT_F16: return 2 * floats;
    case CNORM_WEIGHT_I8:
        if (matrix->cols > CNORM_INT8_COLS) return 0;
        return packed_rows(matrix) * ((matrix->cols + 3) / 4 * 4 + (ptrdiff_t)sizeof(float));
    }
    return 0; /* a number that is no type */
}

static cnorm_status check(const cnorm_matrix *matrix, const void *from, const void *to)
{
    if (!matrix) return CNORM_ERROR_NULL;
    if (cnorm_matrix_bytes(matrix) == 0 || matrix->group < 0 || matrix->group > matrix->gates) return CNORM_ERROR_SIZE;
    return from && to ? CNORM_OK : CNORM_ERROR_NULL;
}

/* the row of the packed matrix that holds row r of W */
static ptrdiff_t packed_row(const cnorm_matrix *matrix, ptrdiff_t r)
{
    return r / matrix->units * padded_units(matrix->units) + r % matrix->units;
}

/* 2^-63, or that part of the largest of w [count] if it is below 1, at least 2^-126: smaller ones are packed as 0,
 * because their products may be subnormal */
static float least_weight(ptrdiff_t count, const float *w)
{
    float largest = 0;
    for (ptrdiff_t i = 0; i < count; ++i)
        if (fabsf(w[i]) > largest) largest = fabsf(w[i]);
    if (!(largest <= 0x1.fffffep127f)) return 0;
    if (largest >= 1) return 0x1p-63f;
    return largest > 0x1p-63f ? largest * 0x1p-63f : 0x1p-126f;
}

static float floored(float w, float least) { return fabsf(w) < least ? 0 : w; }

enum { LINE = 16 }; /* columns that are read and written together: a cache line of a row */

/* means [count] of the columns from k on, over the gates of a group, which hold the rows from `first` to `end`; 0 if
 * there are no groups */
static void column_means(const cnorm_matrix *matrix, const float *w, ptrdiff_t k, ptrdiff_t count, ptrdiff_t first,
                         ptrdiff_t end, double *means)
{
    for (ptrdiff_t i = 0; i < count; ++i) means[i] = 0;
    if (!matrix->group) return;
    for (ptrdiff_t r = first; r < end; ++r)
        for (ptrdiff_t i = 0; i < count; ++i) means[i] += (double)w[r * matrix->cols + k + i];
    for (ptrdiff_t i = 0; i < count; ++i) means[i] /= (double)(end - first);
}

cnorm_status cnorm_matrix_pack(ptrdiff_t gates, ptrdiff_t units, ptrdiff_t cols, ptrdiff_t group, const float *w,
                               float *panels)
{
    const cnorm_matrix matrix = {.gates = gates, .units = units, .cols = cols, .group = group};
    const cnorm_status status = check(&matrix, w, panels);
    if (status != CNORM_OK) return status;
    const ptrdiff_t rows = gates * units, span = (group ? group : gates) * units;
    const float_mode mode = float_mode_enter();
    const float least = least_weight(rows * cols, w);
    memset(panels, 0, (size_t)cnorm_matrix_bytes(&matrix));
    for (ptrdiff_t k = 0; k < cols; k += LINE) {
        const ptrdiff_t count = cols - k < LINE ? cols - k : LINE;
        double means[LINE];
        for (ptrdiff_t first = 0; first < rows; first += span) {
            const ptrdiff_t end = first + span < rows ? first + span : rows;
            column_means(&matrix, w, k, count, first, end, means);
            for (ptrdiff_t r = first; r < end; ++r) {
                const ptrdiff_t at = packed_row(&matrix, r);
                float *to = panels + at / PANEL * PANEL * cols + k * PANEL + at % PANEL;
                for (ptrdiff_t i = 0; i < count; ++i)
                    to[i * PANEL] = floored((float)((double)w[r * cols + k + i] - means[i]), least);
            }
        }
    }
    float_mode_leave(mode);
    return CNORM_OK;
}

/* ---- from W to rows of a type -------------------------------------------------------------------------------- */

/* the float16 of |a| <= 65504, rounded to nearest even */
static uint16_t float16_of(double a)
{
    const uint16_t sign = signbit(a) ? 0x8000 : 0;
    int exponent = a == 0 ? -14 : ilogb(a);
    if (exponent < -14) exponent = -14;
    const long steps = lrint(ldexp(fabs(a), 10 - exponent)); /* a carry gives the next exponent below */
    return (uint16_t)(sign | (((exponent + 14) << 10) + steps));
}

/* the int8 of w, whose row has this scale */
static int8_t int8_of(float w, float scale)
{
    const double rounded = rint((double)w / (double)scale);
    return (int8_t)(rounded > 127 ? 127 : rounded < -127 ? -127 : rounded);
}

/* Rounds the centred weight w to element `at` of rows; false if it is out of range. int8 takes two passes: pass 0 finds
 * the largest |w| of each row, in *scale. */
static int round_weight(cnorm_weight_type type, int pass, double w, ptrdiff_t at, void *rows, float *scale)
{
    if (!(fabs(w) <= (type == CNORM_WEIGHT_F16 ? 65504 : 0x1.fffffep127))) return 0;
    switch (type) {
    case CNORM_WEIGHT_F32: ((float *)rows)[at] = (float)w; break;
    case CNORM_WEIGHT_F16: ((uint16_t *)rows)[at] = float16_of(w); break;
    case CNORM_WEIGHT_I8:
        if (pass == 1) ((int8_t *)rows)[at] = int8_of((float)w, *scale);
        else if (fabsf((float)w) > *scale) *scale = fabsf((float)w);
    }
    return 1;
}

cnorm_status cnorm_matrix_round(const cnorm_matrix *matrix, const float *w, void *rows, float *scales)
{
    const cnorm_status status = check(matrix, w, rows);
    if (status != CNORM_OK) return status;
    const int quantized = matrix->type == CNORM_WEIGHT_I8;
    if (quantized && !scales) return CNORM_ERROR_NULL;
    const ptrdiff_t cols = matrix->cols, count = matrix->gates * matrix->units;
    const ptrdiff_t span = (matrix->group ? matrix->group : matrix->gates) * matrix->units;
    int held = 1;
    const float_mode mode = float_mode_enter();
    for (ptrdiff_t r = 0; r < count && quantized; ++r) scales[r] = 0;
    for (int pass = 0; pass <= quantized; ++pass) {
        for (ptrdiff_t k = 0; k < cols; ++k) {
            for (ptrdiff_t first = 0; first < count; first += span) {
                const ptrdiff_t end = first + span < count ? first + span : count;
                double mean;
                column_means(matrix, w, k, 1, first, end, &mean);
                for (ptrdiff_t r = first; r < end; ++r)
                    held &= round_weight(matrix->type, pass, (double)w[r * cols + k] - mean, r * cols + k, rows,
                                         quantized ? scales + r : NULL);
            }
        }
        for (ptrdiff_t r = 0; r < count && quantized && pass == 0; ++r) {
            scales[r] = (float)((double)scales[r] / 127);
            if (scales[r] == 0) scales[r] = 1;
        }
    }
    float_mode_leave(mode);
    return held ? CNORM_OK : CNORM_ERROR_VALUE;
}

/* ---- from rows to panels ------------------------------------------------------------------------------------- */

/* int8 rows: stores w + CNORM_INT8_BIAS in the layout of int8/backends.h, and sets levels so that sums fit int32. */
static cnorm_status pack_int8(cnorm_matrix *matrix, const int8_t *rows, const float *scales, void *panels)
{
    const ptrdiff_t cols = matrix->cols, padded = (cols + 3) / 4 * 4, count = matrix->gates * matrix->units;
    float *scale = panels;
    uint8_t *weights = (uint8_t *)(scale + packed_rows(matrix));
    memset(scale, 0, (size_t)packed_rows(matrix) * sizeof *scale);
    memset(weights, CNORM_INT8_BIAS, (size_t)(packed_rows(matrix) * padded));
    int64_t largest = 1; /* sum of |w| over a row */
    for (ptrdiff_t r = 0; r < count; ++r) {
        const ptrdiff_t at = packed_row(matrix, r);
        uint8_t *to = weights + at / PANEL * PANEL * padded + at % PANEL * 4;
        int64_t sum = 0;
        if (!(scales[r] > 0 && scales[r] <= 0x1.fffffep127f)) return CNORM_ERROR_VALUE;
        scale[at] = scales[r];
        for (ptrdiff_t k = 0; k < cols; ++k) {
            const int w = rows[r * cols + k];
            if (w < -127) return CNORM_ERROR_VALUE;
            to[k / 4 * 4 * PANEL + k % 4] = (uint8_t)(w + CNORM_INT8_BIAS);
            sum += w < 0 ? -w : w;
        }
        if (sum > largest) largest = sum;
    }
    matrix->levels = largest > INT32_MAX / CNORM_INT8_LEVELS ? (int)(INT32_MAX / largest) : CNORM_INT8_LEVELS;
    return CNORM_OK;
}

cnorm_status cnorm_matrix_pack_rows(cnorm_matrix *matrix, const void *rows, const float *scales, void *panels)
{
    const cnorm_status status = check(matrix, rows, panels);
    if (status != CNORM_OK) return status;
    if (matrix->type == CNORM_WEIGHT_I8 && !scales) return CNORM_ERROR_NULL;
    matrix->panels = panels;
    matrix->levels = 0;
    if (matrix->type == CNORM_WEIGHT_I8) return pack_int8(matrix, rows, scales, panels);
    const ptrdiff_t cols = matrix->cols;
    const int wide = matrix->type == CNORM_WEIGHT_F32; /* float16 has no number that is so small beside another */
    const float least = wide ? least_weight(matrix->gates * matrix->units * cols, rows) : 0;
    memset(panels, 0, (size_t)cnorm_matrix_bytes(matrix));
    for (ptrdiff_t r = 0; r < matrix->gates * matrix->units; ++r) {
        const ptrdiff_t at = packed_row(matrix, r) / PANEL * PANEL * cols + packed_row(matrix, r) % PANEL;
        for (ptrdiff_t k = 0; k < cols; ++k) {
            switch (matrix->type) {
            case CNORM_WEIGHT_F32:
                ((float *)panels)[at + k * PANEL] = floored(((const float *)rows)[r * cols + k], least);
                break;
            case CNORM_WEIGHT_F16: ((uint16_t *)panels)[at + k * PANEL] = ((const uint16_t *)rows)[r * cols + k]; break;
            case CNORM_WEIGHT_I8: break; /* above */
            }
        }
    }
    return CNORM_OK;
}
