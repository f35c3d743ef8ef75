/* Operations on arrays, once for each compute type T. Their loops are over vectors, as all are whose speed counts:
 * src/meson.build turns the compiler's vectorisation off. */

/* the first `count` numbers from p on, of a vector of float64; the others 0 */
INLINE f64v TN(elements)(const T *p, ptrdiff_t count)
{
    const void *at = p;
    if (sizeof(T) == sizeof(double)) return load_first_f64(at, count);
    return count >= VL_F64 ? load_widened(at) : widen_lo(load_range_f32(at, 0, count));
}

/* into [n] += from [n] */
static void TN(add)(ptrdiff_t n, T *into, const T *from)
{
    ptrdiff_t j = 0;
    for (; j + VL <= n; j += VL) TN(store)(into + j, TN(load)(into + j) + TN(load)(from + j));
    if (j < n) TN(store_first)(into + j, n - j, TN(load_first)(into + j, n - j) + TN(load_first)(from + j, n - j));
}

/* the same in float64 */
static NOINLINE void TN(add_wide)(ptrdiff_t n, double *into, const T *from)
{
    for (ptrdiff_t j = 0; j < n; j += VL_F64)
        store_first_f64(into + j, n - j, load_first_f64(into + j, n - j) + TN(elements)(from + j, n - j));
}

/* to [n] = from [n], rounded */
static NOINLINE void TN(narrow_array)(ptrdiff_t n, const double *from, T *to)
{
    ptrdiff_t j = 0;
    for (; sizeof(T) < sizeof(double) && j + VL_F32 <= n; j += VL_F32)
        store_f32((void *)(to + j), narrow(load_f64(from + j), load_f64(from + j + VL_F64)));
    if (sizeof(T) == sizeof(double)) memcpy(to, from, (size_t)n * sizeof(T));
    else
        for (; j < n; ++j) to[j] = (T)from[j];
}

/* Copies a parameter [n] to `space`; a NULL one is n times `neutral`, its neutral value. For half types every NaN
 * becomes the default quiet NaN: see PARAMS. */
static NOINLINE const T *TN(param)(const T *from, T neutral, ptrdiff_t n, int half, T *space)
{
    if (from && !half) return memcpy(space, from, (size_t)n * sizeof(T));
    const V all = TN(splat)(neutral);
    for (ptrdiff_t j = 0; j < n; j += VL)
        TN(store_first)(space + j, n - j, from ? TN(default_nan)(TN(load_first)(from + j, n - j)) : all);
    return space;
}
