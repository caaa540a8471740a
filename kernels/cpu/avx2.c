/* For x86-64 since 2013. */

#include "attention.h"

#ifdef X86

#include "avx2.h"

#include "passes.h"

const PassFunction avx2_passes[DTYPES] = {pass_float32, pass_float16, pass_bfloat16};

#endif
