/* The golden hashes: one file per operation and dtype, the same for every instruction set, compiler and machine.
 *
 *     golden DIRECTORY           every instruction set gives what the files say
 *     golden --write DIRECTORY   write the files anew: a knowing change of results, to be told in the changelog
 *
 * A file names the kinds of input, so that a change shows where it is. Hashes are FNV-1a, 64 bits, over the results
 * with every NaN written the same way.
 */
#include "rows.h"

static uint64_t hash_of(uint64_t hash, cnorm_dtype dtype, void *buffer, ptrdiff_t count)
{
    canonicalise(dtype, buffer, count);
    for (ptrdiff_t i = 0; i < count * size_of(dtype); ++i) hash = (hash ^ ((unsigned char *)buffer)[i]) * 0x100000001b3u;
    return hash;
}
static const uint64_t EMPTY = 0xcbf29ce484222325u;

/* a JSON object in the making */
typedef struct text {
    char bytes[16384];
    size_t length;
} text;

static void begin(text *t) { t->length = (size_t)snprintf(t->bytes, sizeof t->bytes, "{"); }
static void add(text *t, const char *name, uint64_t hash)
{
    t->length += (size_t)snprintf(t->bytes + t->length, sizeof t->bytes - t->length, "%s\n  \"%s\": \"%016llx\"",
                                  t->length == 1 ? "" : ",", name, (unsigned long long)hash);
    if (t->length >= sizeof t->bytes) abort();
}
static void end(text *t) { t->length += (size_t)snprintf(t->bytes + t->length, sizeof t->bytes - t->length, "\n}\n"); }

/* every tail of every vector width, and the folds at 8192 elements */
static ptrdiff_t length_number(int i)
{
    static const ptrdiff_t long_ones[] = {95, 96, 97, 127, 128, 129, 255, 256, 257, 768, 1000, 1024, 8191, 8192, 8193, 16385};
    if (i < 70) return i + 1;
    return i - 70 < (int)(sizeof long_ones / sizeof *long_ones) ? long_ones[i - 70] : 0;
}
enum { ROWS = 3, LONGEST = 16385 };

typedef struct buffers {
    char x[ROWS * LONGEST * 8], y[ROWS * LONGEST * 8], dy[ROWS * LONGEST * 8], gain[LONGEST * 8], bias[LONGEST * 8];
    char stats[3 * ROWS * 8], dgain[LONGEST * 8], dbias[LONGEST * 8], partials[2 * LONGEST * 8];
} buffers;
static _Alignas(CNORM_ALIGN) buffers b;

static void fill_rows(row_kind kind, cnorm_dtype dtype, ptrdiff_t n, uint64_t *state)
{
    for (ptrdiff_t row = 0; row < ROWS; ++row) {
        const int spares_this_row = (kind == ONE_NAN || kind == ONE_INFINITY) && row != 1;
        fill_row(spares_this_row ? MEAN_0 : kind, dtype, n, b.x + row * n * size_of(dtype), state);
    }
    fill_row(MEAN_0, dtype, ROWS * n, b.dy, state);
    fill_affine(dtype, n, b.gain, b.bias, state);
}

static void layer_norm(cnorm_dtype dtype, text *out)
{
    for (row_kind kind = 0; kind < ROW_KINDS; ++kind) {
        uint64_t hash = EMPTY, state = kind;
        for (int i = 0, n; (n = (int)length_number(i)) != 0; ++i) {
            fill_rows(kind, dtype, n, &state);
            for (int choice = 0; choice < 4; ++choice) {
                CHECK(cnorm_layer_norm(dtype, ROWS, n, b.x, n, choice & 1 ? b.gain : NULL, choice & 2 ? b.bias : NULL,
                                       i % 2 ? 1e-5 : 0, b.y, n, b.stats) == CNORM_OK, "n = %d", n);
                hash = hash_of(hash, dtype, b.y, (ptrdiff_t)ROWS * n);
                hash = hash_of(hash, dtype, b.stats, 3 * ROWS);
            }
        }
        add(out, row_names[kind], hash);
    }
}

static void layer_norm_backward(cnorm_dtype dtype, text *out)
{
    for (row_kind kind = 0; kind < ROW_KINDS; ++kind) {
        uint64_t hash = EMPTY, state = kind;
        for (int i = 0, n; (n = (int)length_number(i)) != 0; ++i) {
            fill_rows(kind, dtype, n, &state);
            CHECK(cnorm_layer_norm(dtype, ROWS, n, b.x, n, NULL, NULL, i % 2 ? 1e-5 : 0, b.y, n, b.stats) == CNORM_OK,
                  "n = %d", n);
            for (int gain = 0; gain < 2; ++gain) {
                CHECK(cnorm_layer_norm_backward(dtype, ROWS, n, b.dy, n, b.x, n, gain ? b.gain : NULL, b.stats, b.y, n,
                                                b.dgain, b.dbias, b.partials) == CNORM_OK, "n = %d", n);
                hash = hash_of(hash, dtype, b.y, (ptrdiff_t)ROWS * n);
                hash = hash_of(hash, dtype, b.dgain, n);
                hash = hash_of(hash, dtype, b.dbias, n);
            }
        }
        add(out, row_names[kind], hash);
    }
    static const int numbers_of_rows[] = {1, 63, 64, 65, 129, 449}; /* the tree over the blocks */
    for (size_t i = 0; i < sizeof numbers_of_rows / sizeof *numbers_of_rows; ++i) {
        const ptrdiff_t rows = numbers_of_rows[i], n = 37;
        uint64_t hash = EMPTY, state = i;
        fill_row(MEAN_1, dtype, rows * n, b.x, &state);
        fill_row(MEAN_0, dtype, rows * n, b.dy, &state);
        void *stats = allocate(rows * 3 * size_of(dtype));
        CHECK(cnorm_layer_norm(dtype, rows, n, b.x, n, NULL, NULL, 1e-5, b.y, n, stats) == CNORM_OK, "%td rows", rows);
        CHECK(cnorm_layer_norm_backward(dtype, rows, n, b.dy, n, b.x, n, NULL, stats, b.y, n, b.dgain, b.dbias,
                                        b.partials) == CNORM_OK, "%td rows", rows);
        free(stats);
        hash = hash_of(hash, dtype, b.y, rows * n);
        hash = hash_of(hash, dtype, b.dgain, n);
        hash = hash_of(hash, dtype, b.dbias, n);
        char name[32];
        snprintf(name, sizeof name, "%td rows", rows);
        add(out, name, hash);
    }
}

static void elementwise(cnorm_status (*f)(ptrdiff_t, const float *, float *), text *out)
{
    static float x[520], y[520];
    for (uint32_t exponent = 0; exponent < 512; exponent += 64) {
        uint64_t hash = EMPTY;
        for (uint32_t e = exponent; e < exponent + 64; ++e) {
            uint32_t count = 0;
            for (uint32_t m = 0; m < 1u << 23; m += 16381, ++count) { /* a prime: no round mantissas */
                const uint32_t bits = e << 23 | m;
                memcpy(&x[count], &bits, 4);
            }
            CHECK(f((ptrdiff_t)count, x, y) == CNORM_OK, "exponent %u", e);
            hash = hash_of(hash, CNORM_F32, y, (ptrdiff_t)count);
        }
        char name[32];
        snprintf(name, sizeof name, "bits from %08x", (unsigned)(exponent << 23));
        add(out, name, hash);
    }
}
static void sigmoid(cnorm_dtype dtype, text *out) { (void)dtype, elementwise(cnorm_sigmoid_f32, out); }
static void hyperbolic_tangent(cnorm_dtype dtype, text *out) { (void)dtype, elementwise(cnorm_tanh_f32, out); }

static float *random_floats(ptrdiff_t count, double scale, uint64_t *state)
{
    float *v = allocate(count * 4);
    for (ptrdiff_t i = 0; i < count; ++i) v[i] = (float)(scale * bell(state));
    return v;
}

static cnorm_matrix random_matrix(ptrdiff_t gates, ptrdiff_t units, ptrdiff_t cols, int centred, uint64_t *state)
{
    float *w = random_floats(gates * units * cols, 0.25, state), *panels = allocate(cnorm_matrix_floats(gates, units, cols) * 4);
    CHECK(cnorm_matrix_pack(gates, units, cols, w, centred, panels) == CNORM_OK, "%td units", units);
    free(w);
    return (cnorm_matrix){gates, units, cols, panels};
}

/* [4, padded] with zero padding */
static float *random_gates(ptrdiff_t units, double mean, uint64_t *state)
{
    const ptrdiff_t padded = cnorm_padded_units(units);
    float *v = allocate(4 * padded * 4);
    for (ptrdiff_t i = 0; i < 4 * units; ++i) v[i / units * padded + i % units] = (float)(mean + 0.25 * bell(state));
    return v;
}

/* an LSTM and its read-out, over some steps of their own trajectory */
static void lstm_and_linear(cnorm_dtype dtype, text *out)
{
    (void)dtype;
    static const int sizes[][3] = {{1, 1, 1}, {3, 2, 2}, {5, 15, 3}, {7, 16, 1}, {16, 17, 9}, {12, 64, 9}, {33, 100, 40}, {100, 130, 70}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i) {
        const ptrdiff_t inputs = sizes[i][0], units = sizes[i][1], outputs = sizes[i][2], steps = 20;
        uint64_t state = i, hash = EMPTY;
        cnorm_layer layers[2] = {{.kind = CNORM_LSTM}, {.kind = CNORM_LINEAR}};
        layers[0].as.lstm = (cnorm_lstm){random_matrix(4, units, inputs, 1, &state), random_matrix(4, units, units, 1, &state),
            random_gates(units, 1, &state), random_gates(units, 1, &state), random_gates(units, 0, &state),
            random_floats(units, 1, &state), random_floats(units, 1, &state), 1e-5f};
        layers[1].as.linear = (cnorm_linear){random_matrix(1, outputs, units, 0, &state), random_floats(outputs, 1, &state)};
        float *x = random_floats(steps * inputs, 1, &state), *y = allocate(steps * outputs * 4);
        const ptrdiff_t state_floats = cnorm_state_floats(layers, 2);
        float *network_state = allocate(state_floats * 4), *scratch = allocate(cnorm_scratch_floats(layers, 2) * 4);
        CHECK(cnorm_run(layers, 2, steps, x, inputs, network_state, scratch, y, outputs) == CNORM_OK, "%td units", units);
        hash = hash_of(hash, CNORM_F32, y, steps * outputs);
        hash = hash_of(hash, CNORM_F32, network_state, state_floats);
        char name[64];
        snprintf(name, sizeof name, "%td inputs, %td units, %td outputs", inputs, units, outputs);
        add(out, name, hash);
        const cnorm_lstm *cell = &layers[0].as.lstm;
        const void *owned[] = {cell->weight_x.panels, cell->weight_h.panels, cell->gain_x, cell->gain_h, cell->bias,
            cell->gain_c, cell->bias_c, layers[1].as.linear.weight.panels, layers[1].as.linear.bias, x, y, network_state, scratch};
        for (size_t j = 0; j < sizeof owned / sizeof *owned; ++j) free((void *)(uintptr_t)owned[j]);
    }
}

static const struct {
    const char *name;
    cnorm_dtype dtype;
    void (*run)(cnorm_dtype dtype, text *out);
} operations[] = {
    {"layer_norm", CNORM_F32, layer_norm},
    {"layer_norm", CNORM_F64, layer_norm},
    {"layer_norm_backward", CNORM_F32, layer_norm_backward},
    {"layer_norm_backward", CNORM_F64, layer_norm_backward},
    {"sigmoid", CNORM_F32, sigmoid},
    {"tanh", CNORM_F32, hyperbolic_tangent},
    {"lstm", CNORM_F32, lstm_and_linear},
};

int main(int argc, char **argv)
{
    const int write = argc == 3 && strcmp(argv[1], "--write") == 0;
    if (argc != 2 + write) {
        fprintf(stderr, "usage: golden [--write] DIRECTORY\n");
        return 2;
    }
    for (size_t i = 0; i < sizeof operations / sizeof *operations; ++i) {
        char path[1024];
        snprintf(path, sizeof path, "%s/%s.%s.json", argv[1 + write], operations[i].name, dtype_names[operations[i].dtype]);
        static text got, wanted;
        FOR_EACH_ISA(isa) {
            begin(&got);
            operations[i].run(operations[i].dtype, &got);
            end(&got);
            FILE *file = fopen(path, write && isa == 0 ? "wb" : "rb");
            if (!file) {
                perror(path);
                return 1;
            }
            if (write && isa == 0) {
                fwrite(got.bytes, 1, got.length, file);
            } else {
                wanted.length = fread(wanted.bytes, 1, sizeof wanted.bytes - 1, file);
                wanted.bytes[wanted.length] = 0;
                CHECK(strcmp(got.bytes, wanted.bytes) == 0, "%s on %s. It says\n%s\nand this machine gives\n%s", path,
                      cnorm_isa_name(isa), wanted.bytes, got.bytes);
            }
            fclose(file);
        }
    }
    return check_result();
}
