/* The golden hashes: one file per operation and dtype, the same for every instruction set, compiler and machine.
 *
 *     golden DIRECTORY           every instruction set gives what the files say
 *     golden --write DIRECTORY   write the files anew: a knowing change of results, to be told in the changelog
 *
 * A file names the kinds of input, so that a change shows where it is. Hashes are FNV-1a, 64 bits, over the results
 * with every NaN written the same way.
 */
#include "network.h"
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

/* over some steps of their own trajectory */
static void lstm_and_linear(cnorm_dtype dtype, text *out)
{
    (void)dtype;
    static const int sizes[][3] = {{1, 1, 1}, {3, 2, 2}, {5, 15, 3}, {7, 16, 1}, {16, 17, 9}, {12, 64, 9}, {33, 100, 40}, {100, 130, 70}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i) {
        network net = network_random_of(sizes[i][0], sizes[i][1], sizes[i][2], allocate);
        uint64_t state = i, hash = EMPTY;
        static float x[20 * 100], y[20 * 70];
        for (size_t j = 0; j < sizeof x / sizeof *x; ++j) x[j] = (float)bell(&state);
        network_run(&net, 20, x, y);
        hash = hash_of(hash, CNORM_F32, y, 20 * net.outputs);
        hash = hash_of(hash, CNORM_F32, net.state, cnorm_state_floats(net.layers, NETWORK_LAYERS));
        char name[64];
        snprintf(name, sizeof name, "%td inputs, %td units, %td outputs", net.inputs, net.units, net.outputs);
        add(out, name, hash);
        network_free(&net);
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
