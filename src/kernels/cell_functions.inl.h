/* The functions of a cell: of its gates, s in cnorm_cell, and of its candidate and output, tanh. Cells with sigmoid
 * and tanh go through `activate`; others call the kernel of the layer `activation` for each vector. */

enum { OF_STATE, OF_GATE };

INLINE int plain_rnn(const cnorm_cell *cell) { return cell->activation <= CNORM_ACTIVATION_SIGMOID && cell->clip == 0; }

INLINE cnorm_elementwise function_of(const cnorm_cell *cell, int gate)
{
    const cnorm_activation of_gates =
        cell->recurrent_activation == 0 ? CNORM_ACTIVATION_SIGMOID : cell->recurrent_activation;
    return gate ? (cnorm_elementwise){VL_F32, of_gates, cell->recurrent_alpha, cell->recurrent_beta, NULL}
                : (cnorm_elementwise){VL_F32, cell->activation, cell->alpha, cell->beta, NULL};
}

/* f of a, clipped first */
static NOINLINE f32v other_function(const cnorm_cell *cell, int gate, f32v a)
{
    _Alignas(CNORM_ALIGN) float v[VL_F32];
    const cnorm_elementwise is = function_of(cell, gate);
    store_f32(v, cell->clip > 0 ? clipped(a, cell->clip) : a);
    activation_f32(&is, v, v);
    return load_f32(v);
}

/* dy f'(a), 0 where a is clipped */
static NOINLINE f32v other_function_backward(const cnorm_cell *cell, int gate, f32v a, f32v dy)
{
    _Alignas(CNORM_ALIGN) float v[VL_F32], d[VL_F32];
    const cnorm_elementwise is = function_of(cell, gate);
    store_f32(v, a), store_f32(d, dy);
    activation_backward_f32(&is, v, d, d);
    if (cell->clip == 0) return load_f32(d);
    return clipped_backward(a, cell->clip, load_f32(d));
}

INLINE f32v gate_value(const cnorm_cell *cell, f32v a)
{
    return usual_functions(cell) ? sigmoid_v(a) : other_function(cell, OF_GATE, a);
}
INLINE f32v candidate(const cnorm_cell *cell, f32v a)
{
    return usual_functions(cell) ? tanh_v(a) : other_function(cell, OF_STATE, a);
}

/* v [n] = the function of a gate, or of the candidate or output, of v */
static void cell_functions(const cnorm_cell *cell, int gate, ptrdiff_t n, float *v)
{
    if (usual_functions(cell) && gate) sigmoid_f32(n, v, v);
    else if (usual_functions(cell)) tanh_f32(n, v, v);
    else
        for (ptrdiff_t j = 0; j < n; j += VL_F32) store_f32(v + j, other_function(cell, gate, load_f32(v + j)));
}

/* The padding of a state or an input of the projection, [padded units]: f(0) of another function may not be 0. */
INLINE void clear_padding(const cnorm_cell *cell, float *v)
{
    if (usual_functions(cell)) return;
    for (ptrdiff_t j = cell->weight_x.units; j < padded_units(cell->weight_x.units); ++j) v[j] = 0;
}
