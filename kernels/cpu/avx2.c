/* For x86-64 since 2013. */

#if defined(__x86_64__)

#include "avx2.h"

#include "passes.h"

const PassFunction avx2_passes[DTYPES] = {pass_float32, pass_float16, pass_bfloat16};

#endif
