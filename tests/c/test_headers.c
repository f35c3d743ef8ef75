/* The headers compile on their own, in C99, C11 and C++17, and the functions they declare link. */
#include "cnorm_rnn.h"
#include "cnorm.h"
#include "cnorm_norms.h"
#include "cnorm_train.h"
#include "cnorm_model.h"

int main(void)
{
    static cnorm_norm norm; /* every member 0 */
    static cnorm_weight weight;
    float x[3] = {1, 2, 4}, y[3] = {0, 0, 0};
    cnorm_layer layer;
    layer.kind = CNORM_LAYER_LINEAR;
    norm.rows = weight.rows = 1;
    norm.n = weight.n = 3;
    norm.x = weight.w = x;
    norm.y = weight.out = y;
    norm.eps = 1e-5;
    return cnorm_layer_norm(CNORM_F32, &norm) != CNORM_OK || !(y[0] < y[1] && y[1] < y[2]) ||
           cnorm_state_floats(&layer, 1) != 0 || cnorm_abi_version() != CNORM_ABI_VERSION || !cnorm_isa_active() ||
           cnorm_weight_norm(CNORM_F32, &weight) != CNORM_OK || cnorm_model_memory(x, 3) != 0;
}
