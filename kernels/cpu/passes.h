/* The passes of one instruction set: its header has been included before this one. DOT_BFLOAT16 is set where it multiplies bfloat16. */

#include "softmax.h"
#include "tile.h"

TARGET static inline vf v_times(vf key, const float *query, vf sum) { return v_fma(key, v_load(query), sum); }

#define NAME(x) x##_float32
#define ITEM float
#define ROW v_load_float32
#define QUERY float
#define STEP LANES
#define KEY vf
#define KEYS v_load_float32
#define TIMES v_times
#define PREPARE to_floats
#include "pass.h"

#define NAME(x) x##_float16
#define ITEM uint16_t
#define ROW v_load_float16
#define QUERY float
#define STEP LANES
#define KEY vf
#define KEYS v_load_float16
#define TIMES v_times
#define PREPARE to_floats
#include "pass.h"

#define NAME(x) x##_bfloat16
#define ITEM uint16_t
#define ROW v_load_bfloat16
#ifdef DOT_BFLOAT16
#define QUERY uint16_t
#define STEP (2 * LANES)
#define KEY vk
#define KEYS k_load
#define TIMES k_times
#define PREPARE k_prepare
#else
#define QUERY float
#define STEP LANES
#define KEY vf
#define KEYS v_load_bfloat16
#define TIMES v_times
#define PREPARE to_floats
#endif
#include "pass.h"
