/* For any processor. */

#include "plain.h"

#include "passes.h"

const PassFunction plain_passes[DTYPES] = {pass_float32, pass_float16, pass_bfloat16};
