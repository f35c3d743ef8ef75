/* The functions of a cell: of its gates, s in cnorm_cell, and of its candidate and output, tanh. Those of a layer
 * `activation`, in arrays where it can be: the steps of one vector wait for each other. */

enum { OF_STATE, OF_GATE };

INLINE cnorm_elementwise function_of(const cnorm_cell *cell, int gate, ptrdiff_t n)
{
    const cnorm_activation of_gates =
        cell->recurrent_activation == 0 ? CNORM_ACTIVATION_SIGMOID : cell->recurrent_activation;
    return gate ? (cnorm_elementwise){n, of_gates, cell->recurrent_alpha, cell->recurrent_beta, NULL}
                : (cnorm_elementwise){n, cell->activation, cell->alpha, cell->beta, NULL};
}

/* v [n] = the function of a gate, or of the candidate or output, of v, clipped first */
static void cell_functions(const cnorm_cell *cell, int gate, ptrdiff_t n, float *v)
{
    const cnorm_elementwise is = function_of(cell, gate, n);
    for (ptrdiff_t j = 0; cell->clip > 0 && j < n; j += VL_F32) store_f32(v + j, clipped(load_f32(v + j), cell->clip));
    activation_f32(&is, v, v);
}

/* da [n] = dy f'(a), 0 where a is clipped; da may be dy */
static void cell_functions_backward(const cnorm_cell *cell, int gate, ptrdiff_t n, const float *a, const float *dy,
                                    float *da)
{
    const cnorm_elementwise is = function_of(cell, gate, n);
    activation_backward_f32(&is, a, dy, da);
    for (ptrdiff_t j = 0; cell->clip > 0 && j < n; j += VL_F32)
        store_f32(da + j, clipped_backward(load_f32(a + j), cell->clip, load_f32(da + j)));
}
static NOINLINE f32v cell_function_backward(const cnorm_cell *cell, int gate, f32v a, f32v dy)
{
    _Alignas(CNORM_ALIGN) float v[VL_F32], d[VL_F32];
    store_f32(v, a), store_f32(d, dy);
    cell_functions_backward(cell, gate, VL_F32, v, d, d);
    return load_f32(d);
}

/* The padding of a state or an input of the projection, [padded units]: f(0) of another function may not be 0. */
INLINE void clear_padding(const cnorm_cell *cell, float *v)
{
    if (usual_functions(cell)) return;
    for (ptrdiff_t j = cell->weight_x.units; j < padded_units(cell->weight_x.units); ++j) v[j] = 0;
}
