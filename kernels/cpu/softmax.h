/* The online softmax over a tile's scores, in the vectors of one instruction set. Milakov & Gimelshein 2018. */

/* 2^x for x <= 0; 0 below 2^-126. Relative error 2e-7; what is not a number stays so. The polynomial is Taylor's, on [-0.5, 0.5]. */
TARGET static inline vf v_exp2(vf x)
{
    const vf held = v_max(v_set(-126), x), whole = v_floor(held + v_set(0.5f)), rest = held - whole;
    vf sum = v_set(1.5403530393381609e-4f);
    sum = v_fma(sum, rest, v_set(1.3333558146428443e-3f));
    sum = v_fma(sum, rest, v_set(9.6181291076284772e-3f));
    sum = v_fma(sum, rest, v_set(5.5504108664821580e-2f));
    sum = v_fma(sum, rest, v_set(2.4022650695910071e-1f));
    sum = v_fma(sum, rest, v_set(6.9314718055994531e-1f));
    sum = v_fma(sum, rest, v_set(1));
    return v_unless_below(sum * v_power(whole), x, -126);
}

/* tanh(x), through 2^(-2|x| log2 e): absolute error 1e-7. */
TARGET static inline vf v_tanh(vf x)
{
    const vf size = v_max(v_set(0) - x, x), small = v_exp2(size * v_set(-2 * LOG2E));
    const vf found = (v_set(1) - small) / (v_set(1) + small);
    return v_signed(found, x);
}

/* Scores [n] become weights relative to the greatest so far, which `top` keeps; `sums` [LANES] adds them up. What lies behind n, up to
 * whole vectors, is no less than the least score, and becomes 0. Returns what all earlier weights have to be multiplied by. */
TARGET static inline float soften(float *scores, int n, const Decode *decode, float *top, float *sums)
{
    const int whole = (n + LANES - 1) / LANES * LANES;
    const int capped = decode->softcap > 0;
    const vf scale = v_set(decode->scale * (capped ? 1 / decode->softcap : LOG2E)), cap = v_set(decode->softcap * LOG2E);
    vf greatest = v_set(LOWEST);
    for (int i = 0; i < whole; i += LANES) {
        vf score = v_load(scores + i) * scale;
        if (capped)
            score = v_tanh(score) * cap;
        v_store(scores + i, score);
        greatest = v_max(score, greatest);
    }
    float factor = 1;
    vf total = v_load(sums);
    if (v_any_above(greatest, *top)) {
        const float before = *top;
        *top = v_greatest(greatest);
        factor = v_first(v_exp2(v_set(before - *top)));
        total = total * v_set(factor);
    }
    for (int i = n; i < whole; i++)
        scores[i] = -INFINITY;
    for (int i = 0; i < whole; i += LANES) {
        const vf weight = v_exp2(v_load(scores + i) - v_set(*top));
        v_store(scores + i, weight);
        total = total + weight;
    }
    v_store(sums, total);
    return factor;
}
