/* A row that is read, alone or with its residual: from the storage type X to the compute type T. */

/* A row to read, and where its sum with the residual goes */
typedef struct FN(carry) FN(carry);
typedef struct {
    const X *x, *residual; /* residual may be NULL, and is with sum */
    X *sum;
    FN(carry) *sum_carry; /* NULL unless the sum is streamed */
} FN(row);

INLINE V FN(row_load)(const FN(row) *row, ptrdiff_t j)
{
    V v = FN(load)(row->x + j);
    return row->residual ? FN(rounded)(v + FN(load)(row->residual + j)) : TN(keep)(v);
}

/* lanes from <= i < to of the vector at j, the others zero */
INLINE V FN(row_load_range)(const FN(row) *row, ptrdiff_t j, ptrdiff_t from, ptrdiff_t to)
{
    const V zero = TN(splat)(0), v = FN(load_range)(row->x + j, from, to, zero);
    return row->residual ? FN(rounded)(v + FN(load_range)(row->residual + j, from, to, zero)) : v;
}
