/* The table of kernels that each instruction set fills, their argument structs, and what they may assume.
 *
 * api.c, api_norms.c and rnn/ check every argument first: no kernel checks, allocates, locks or prints.
 * Kernels for several dtypes take void pointers and are arrays indexed by cnorm_dtype. */
#ifndef CNORM_KERNELS_H
#define CNORM_KERNELS_H

#include "batch_scratch.h"
#include "cnorm_norms.h"
#include "cnorm_rnn.h"
#include "layout.h"

#include <stdint.h>

enum {
    PANEL = 32,      /* outputs of a panel of a packed matrix, one in each lane */
    CNORM_ROWS = 64, /* the most rows (steps or streams) of one call of a kernel that multiplies by a matrix */
};

static inline ptrdiff_t padded_units(ptrdiff_t units)
{
    return (units + CNORM_GATE_PAD - 1) / CNORM_GATE_PAD * CNORM_GATE_PAD;
}

/* rows of the packed matrix: gates of padded units, and these padded to whole panels */
static inline ptrdiff_t used_rows(const cnorm_matrix *w) { return w->gates * padded_units(w->units); }
static inline ptrdiff_t packed_rows(const cnorm_matrix *w) { return (used_rows(w) + PANEL - 1) / PANEL * PANEL; }

/* stride in floats of the rows of W_x x and of W_h h of a cell. A row is the products, then CNORM_GATE_PAD
 * floats: the rstd of each gate in float32, and from WIDE_RSTD on in float64. */
enum { WIDE_RSTD = CNORM_GATE_PAD / 2 };
static inline ptrdiff_t input_row_floats(const cnorm_cell *cell)
{
    return packed_rows(&cell->weight_x) + CNORM_GATE_PAD;
}
static inline ptrdiff_t state_row_floats(const cnorm_cell *cell)
{
    return packed_rows(&cell->weight_h) + CNORM_GATE_PAD;
}

/* the state of a cell: h [padded outputs], then for an LSTM c [padded units] */
static inline ptrdiff_t cell_state_floats(const cnorm_cell *cell)
{
    const int lstm = cell->kind == CNORM_CELL_LSTM;
    return padded_units(cell->weight_h.cols) + (lstm ? padded_units(cell->weight_x.units) : 0);
}

/* The gates of a cell, in the order of the kernels. The GRU's candidate is GRU_N. */
enum { LSTM_F, LSTM_I, LSTM_O, LSTM_G, LSTM_GATES };
enum { GRU_Z, GRU_R, GRU_N, GRU_GATES };

/* the matrix of a product that needs the gates first, W_n or W_p, or NULL */
static inline const cnorm_matrix *second_product(const cnorm_cell *cell)
{
    return cell->weight_n.panels ? &cell->weight_n : cell->weight_p.panels ? &cell->weight_p : NULL;
}

/* Scratch of `products` for `rows` vectors. float32 and float16 weights: the vectors, scaled. int8: the quantised
 * vectors, eight bytes for four inputs, and one more vector. */
static inline ptrdiff_t product_scratch_floats(const cnorm_matrix *w, ptrdiff_t rows)
{
    if (w->type == CNORM_WEIGHT_I8) return (rows + 1) * ((w->cols + 3) / 4 * 2);
    return rows * w->cols;
}

/* The arrays of cell_step for `rows` streams. cell_scratch lays them out in scratch, but for zx, which is the caller's;
 * with memory NULL only its size. The forward pass that records a tape puts zx, zh and gates there. */
typedef struct cnorm_cell_scratch {
    const float *zx; /* [rows, input_row_floats]: W_x x, then its rstd */
    float *zh;       /* [rows, state_row_floats]: W_h h, then its rstd */
    float *gates;    /* an LSTM's [rows, lstm_gates_floats]; in scratch one row, which all streams use in turn */
    ptrdiff_t zx_stride, zh_stride, gates_stride;
    float *previous_h; /* [padded outputs]: h of one stream before the step */
    float *z2;         /* [rows, packed rows]: the second product, W_n or W_p, if there is one */
    float *in2;        /* [2 rows, padded units]: its inputs, then the update gates s(z); of another GRU two rows */
    float *products;   /* product_scratch_floats: scratch of `products` */
    int backwards;     /* with one stream: W_h from its last rows on */
    ptrdiff_t floats;
} cnorm_cell_scratch;

/* whether the functions of the gates and of the state are sigmoid and tanh */
static inline int usual_functions(const cnorm_cell *cell)
{
    return cell->activation == CNORM_ACTIVATION_TANH && cell->clip == 0 &&
           (cell->recurrent_activation == 0 || cell->recurrent_activation == CNORM_ACTIVATION_SIGMOID);
}

/* s(f), s(i), s(o), tanh(g) and the tanh of the cell's output, each [padded units] */
static inline ptrdiff_t lstm_gates_floats(const cnorm_cell *cell)
{
    return cell->kind == CNORM_CELL_LSTM ? 5 * padded_units(cell->weight_x.units) : 0;
}

static inline cnorm_cell_scratch cell_scratch(const cnorm_cell *cell, ptrdiff_t rows, float *memory)
{
    const cnorm_matrix *second = second_product(cell);
    const ptrdiff_t width = padded_units(cell->weight_x.units), item = (ptrdiff_t)sizeof(float);
    const ptrdiff_t for_h = product_scratch_floats(&cell->weight_h, rows);
    const ptrdiff_t for_second = second ? product_scratch_floats(second, rows) : 0;
    layout l = {(char *)memory, 0};
    cnorm_cell_scratch s = {.zx_stride = input_row_floats(cell), .zh_stride = state_row_floats(cell)};
    s.zh = layout_take(&l, rows * state_row_floats(cell) * item);
    s.gates = layout_take(&l, lstm_gates_floats(cell) * item);
    s.previous_h = layout_take(&l, padded_units(cell->weight_h.cols) * item);
    s.z2 = layout_take(&l, second ? rows * packed_rows(second) * item : 0);
    s.in2 = layout_take(&l, second ? 2 * rows * width * item : cell->kind == CNORM_CELL_GRU ? 2 * width * item : 0);
    s.products = layout_take(&l, (for_h > for_second ? for_h : for_second) * item);
    s.floats = l.used / item;
    return s;
}

/* Whether a step of the cell is two products of float32 and the gates, without a norm, a second product or a clip: for
 * kernels of small cells, which do not have the rest. */
static inline int plain_cell(const cnorm_cell *cell)
{
    if (!usual_functions(cell) || cell->zoneout > 0) return 0;
    if (cell->weight_x.type != CNORM_WEIGHT_F32 || cell->weight_h.type != CNORM_WEIGHT_F32) return 0;
    if (cell->scope != CNORM_SCOPE_NONE || cell->inside_x || cell->inside_h || second_product(cell)) return 0;
    if (cell->kind == CNORM_CELL_GRU) return cell->reset == CNORM_RESET_AFTER;
    return cell->kind == CNORM_CELL_LSTM && cell->cell_norm == CNORM_CELL_NORM_NONE &&
           cell->cell_clip > 0x1.fffffep127f;
}

/* The arrays of positions_step; with memory NULL only their size. Each has CNORM_GATE_PAD floats more, into which whole
 * vectors are stored. */
typedef struct positions_arrays {
    float *x, *h, *inner, *gates; /* [inputs, positions], [units, positions], the same, [gates, units, positions] */
    ptrdiff_t floats;
} positions_arrays;

static inline positions_arrays positions_arrays_of(const cnorm_cell *cell, ptrdiff_t positions, float *memory)
{
    const ptrdiff_t item = (ptrdiff_t)sizeof(float), units = padded_units(cell->weight_x.units * positions);
    layout l = {(char *)memory, 0};
    positions_arrays s;
    s.x = layout_take(&l, (padded_units(cell->weight_x.cols * positions) + CNORM_GATE_PAD) * item);
    s.h = layout_take(&l, (units + CNORM_GATE_PAD) * item);
    s.inner = layout_take(&l, (units + CNORM_GATE_PAD) * item);
    s.gates = layout_take(&l, (cell->weight_x.gates * units + CNORM_GATE_PAD) * item);
    s.floats = l.used / item;
    return s;
}

/* The windows of all places in a frame: element t channels + c of that of place p is at[offset[t] + c row + p]. A whole
 * vector may be read from the last place on. With groups > 1 the weights between groups are 0: of each `period` rows of
 * the matrix a groups-th part reads a groups-th part of the channels. */
typedef struct cnorm_frame_view {
    const float *at;
    ptrdiff_t row, channels, taps, places, groups, period;
    const ptrdiff_t *offset; /* [taps] */
} cnorm_frame_view;

/* A plain_cell of at most SCAN_UNITS units, scanned over a frame that is not tiny. At most SCANS are scanned together,
 * of the same number of inputs and the same form. */
enum { SCAN_UNITS = CNORM_GATE_PAD, SCANS = 4 };
typedef struct cnorm_frame_scan {
    const cnorm_cell *cell;
    int backwards;  /* whether it begins at the last position */
    const float *x; /* [inputs, positions] */
    float *y;       /* [units, positions] */
    float *state;   /* cell_state_floats: set where positions are left */
    ptrdiff_t done; /* positions; set */
} cnorm_frame_scan;

/* scratch of cell_scan for the cell and others: weights, biases and states */
static inline ptrdiff_t cell_scan_floats(const cnorm_cell *cell)
{
    const cnorm_matrix *w = &cell->weight_x;
    return 2 * SCAN_UNITS * ((w->cols + SCAN_UNITS + 1) * w->gates + 3);
}

/* The structs of norms are those of the C API with these differences: every stride is set, and 0 is that of one row;
 * a backward call of layer or group norm is over one block of at most CNORM_BLOCK_ROWS rows, whose dgain and dbias are
 * `partials` [2, n] of cnorm_norm_backward, which of smoothing_gradient is one double; radii are below n; and `hints`
 * are some of these. */
enum {
    NT_STORES = 8, /* use non-temporal stores: outputs exceed the caches, have contiguous rows and overlap no input */
    IN_SWEEP = 2,  /* the processor is faster where a row is written while the next is summed: see layer_norm.inl.h */
};

/* y [n] = x [n], of half type, widened */
typedef struct cnorm_conversion {
    ptrdiff_t n;
    const void *x;
    float *y;
} cnorm_conversion;

/* the frames [channels] under the taps of a convolution over time: `kept` of the state, then those of x */
typedef struct cnorm_tap_rows {
    const float *state, *x;
    ptrdiff_t kept, state_stride, x_stride;
} cnorm_tap_rows;

struct cnorm_cell_backward; /* backward.h */
struct cnorm_outer;

/* The table of one instruction set, declared from the list in kernels.inc. The functions of one type:
 *     add_*             into [n] += from [n]
 *     sigmoid_f32, tanh_f32, activation_f32   y [n] = f(x [n]); y may be x; activation_f32 not for PReLU
 *     activation_backward_f32                 dx [n] = dy f'(x), softmax y (dy - dy y); dx may be x or dy
 *     products_backward                       dx [n, cols] = W^T d, or += with `onto`; d [n, packed rows], padding zero
 *     cell_backward, outer_products           see backward.h
 *     depthwise                               y [channels] of the frames x; y overlaps no input
 *     frame_product     y [units, places] = W x + bias of float32 weights, of frames that are not tiny
 *     frame_depthwise   y [channels, places] of a depthwise convolution; frame_product's and its y is in no input
 *     prelu             y [n] = x, or slope x where x < 0; y may be x
 *     pad_frame         y [channels, row] of x [channels, positions] behind `before` zeros, others behind it; then
 *                       CNORM_GATE_PAD floats of any value
 *     frame_is_tiny     whether x [channels, positions] has a position that `products` would scale
 *     positions_step    a plain_cell at each position, of x and h that are not tiny
 *     cell_scan         up to SCANS cells; it may leave positions undone
 *     linear_step, cell_inputs, cell_step     n <= CNORM_ROWS rows of x and y; state, scratch and panels aligned to
 *                       CNORM_ALIGN; scratch is sized by the functions above */
#define KERNEL(name, call, dtypes) void (*name[CNORM_DTYPES])(const call *);
#define FUNCTION(name, arguments) void(*name) arguments;
typedef struct cnorm_kernels {
    const char *name;
    int (*exact)(void); /* whether the compiler neither fused nor reordered arithmetic */
#include "kernels.inc"
} cnorm_kernels;

/* The instruction sets, from the baseline up, with one exported symbol each; dispatch.c uses the list.
 * X(name, the condition under which this machine can run it) */
#if defined(__x86_64__)
#define CNORM_ISAS(X) X(baseline, 1) X(avx2, cnorm_cpu_has_avx2()) X(avx512, cnorm_cpu_has_avx512())
#elif defined(__aarch64__)
#define CNORM_ISAS(X) X(baseline, 1) X(neon, 1)
#else
#define CNORM_ISAS(X) X(baseline, 1)
#endif

#define CNORM_DECLARE(name, condition)                                                                                 \
    extern __attribute__((visibility("hidden"))) const cnorm_kernels cnorm_kernels_##name;
CNORM_ISAS(CNORM_DECLARE)
#undef CNORM_DECLARE

#endif
