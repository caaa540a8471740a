/* For x86-64 with AVX-512 that multiplies pairs of bfloat16. */

#include "attention.h"

#ifdef X86

#define DOT_BFLOAT16
#define ONLY_BFLOAT16
#include "avx512.h"

#include "passes.h"

const PassFunction avx512_bf16_pass = pass_bfloat16;

#endif
