/* For x86-64 with AVX-512. */

#include "attention.h"

#ifdef X86

#include "avx512.h"

#include "passes.h"

const PassFunction avx512_passes[DTYPES] = {pass_float32, pass_float16, pass_bfloat16};

#endif
