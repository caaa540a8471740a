/* For x86-64 with AVX-512 that multiplies pairs of bfloat16. */

#include "attention.h"

#ifdef X86

#define DOT_BFLOAT16
#include "avx512.h"

#include "passes.h"

const PassFunction avx512_bf16_passes[DTYPES] = {pass_float32, pass_float16, pass_bfloat16};

#endif
