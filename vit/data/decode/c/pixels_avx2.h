/* The kernels of pixels.h in AVX2. They produce the same bytes, 16 or 32 samples at a time. */
#ifndef VIT_PIXELS_AVX2_H
#define VIT_PIXELS_AVX2_H

#include "pixels.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>
#define HAVE_AVX2_KERNELS 1
#else
#define HAVE_AVX2_KERNELS 0
#endif

#if HAVE_AVX2_KERNELS

#define AVX2 __attribute__((target("avx2")))
#define AVX2_INLINE AVX2 static inline __attribute__((always_inline))

typedef __m256i V;

/* Two 16-bit factors for madd: x0 * p + x1 * q. */
#define PAIR(p, q) _mm256_set1_epi32((int)((uint32_t)(uint16_t)(p) | (uint32_t)(uint16_t)(q) << 16))

/* ---- inverse DCT ---------------------------------------------------------------------------- */

/* Apply one pass to both blocks; x[r] has position r of 8 lines of block a (low half) and b (high).
 *
 * HALF_PASS works on 32-bit numbers, so it processes the low or the high 4 lines of each block.
 */
AVX2_INLINE void idct_lines_avx2(V x[8], const int shift) {
    V out_lo[8];
    V out_hi[8];
    V half = _mm256_set1_epi32(1 << (shift - 1)); /* for rounding */
    V even = _mm256_add_epi16(x[0], x[4]);
    V diff = _mm256_sub_epi16(x[0], x[4]);
    V z3 = _mm256_add_epi16(x[3], x[7]);
    V z4 = _mm256_add_epi16(x[1], x[5]);
#define HALF_PASS(UNPACK, OUT)                                                           \
    {                                                                                    \
        V in26 = UNPACK(x[2], x[6]);                                                     \
        V in71 = UNPACK(x[7], x[1]);                                                     \
        V in53 = UNPACK(x[5], x[3]);                                                     \
        V z34 = UNPACK(z3, z4);                                                          \
        V zero = _mm256_setzero_si256();                                                 \
        V even0 = _mm256_srai_epi32(UNPACK(zero, even), 16 - COSINE_BITS);               \
        V even1 = _mm256_srai_epi32(UNPACK(zero, diff), 16 - COSINE_BITS);               \
        V even3 = _mm256_madd_epi16(in26, PAIR(EVEN_3P, EVEN_3Q));                       \
        V even2 = _mm256_madd_epi16(in26, PAIR(EVEN_2P, EVEN_2Q));                       \
        even0 = _mm256_add_epi32(even0, half);                                           \
        even1 = _mm256_add_epi32(even1, half);                                           \
        V sum0 = _mm256_add_epi32(even0, even3);                                         \
        V sum3 = _mm256_sub_epi32(even0, even3);                                         \
        V sum1 = _mm256_add_epi32(even1, even2);                                         \
        V sum2 = _mm256_sub_epi32(even1, even2);                                         \
        V turn3 = _mm256_madd_epi16(z34, PAIR(ODD_Z3P, ODD_Z3Q));                        \
        V turn4 = _mm256_madd_epi16(z34, PAIR(ODD_Z4P, ODD_Z4Q));                        \
        V odd0 = _mm256_add_epi32(_mm256_madd_epi16(in71, PAIR(ODD_0P, ODD_0Q)), turn3); \
        V odd1 = _mm256_add_epi32(_mm256_madd_epi16(in53, PAIR(ODD_1P, ODD_1Q)), turn4); \
        V odd2 = _mm256_add_epi32(_mm256_madd_epi16(in53, PAIR(ODD_2P, ODD_2Q)), turn3); \
        V odd3 = _mm256_add_epi32(_mm256_madd_epi16(in71, PAIR(ODD_3P, ODD_3Q)), turn4); \
        OUT[0] = _mm256_add_epi32(sum0, odd3);                                           \
        OUT[7] = _mm256_sub_epi32(sum0, odd3);                                           \
        OUT[1] = _mm256_add_epi32(sum1, odd2);                                           \
        OUT[6] = _mm256_sub_epi32(sum1, odd2);                                           \
        OUT[2] = _mm256_add_epi32(sum2, odd1);                                           \
        OUT[5] = _mm256_sub_epi32(sum2, odd1);                                           \
        OUT[3] = _mm256_add_epi32(sum3, odd0);                                           \
        OUT[4] = _mm256_sub_epi32(sum3, odd0);                                           \
        for (int i = 0; i < 8; i++) OUT[i] = _mm256_srai_epi32(OUT[i], shift);           \
    }
    HALF_PASS(_mm256_unpacklo_epi16, out_lo)
    HALF_PASS(_mm256_unpackhi_epi16, out_hi)
#undef HALF_PASS
    for (int i = 0; i < 8; i++) x[i] = _mm256_packs_epi32(out_lo[i], out_hi[i]);
}

/* Transpose the 8 x 8 numbers of each half. */
AVX2_INLINE void transpose_avx2(V x[8]) {
    V pairs[8];
    V quads[8];
    for (int i = 0; i < 4; i++) {
        /* columns 0-3, then 4-7, of rows 2i, 2i + 1 */
        pairs[2 * i] = _mm256_unpacklo_epi16(x[2 * i], x[2 * i + 1]);
        pairs[2 * i + 1] = _mm256_unpackhi_epi16(x[2 * i], x[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        for (int j = 0; j < 2; j++) {
            /* columns 4j, 4j + 1 and 4j + 2, 4j + 3 of rows 4i to 4i + 3 */
            quads[4 * i + 2 * j] = _mm256_unpacklo_epi32(pairs[4 * i + j], pairs[4 * i + 2 + j]);
            quads[4 * i + 2 * j + 1] =
                _mm256_unpackhi_epi32(pairs[4 * i + j], pairs[4 * i + 2 + j]);
        }
    }
    for (int i = 0; i < 4; i++) {
        x[2 * i] = _mm256_unpacklo_epi64(quads[i], quads[4 + i]);
        x[2 * i + 1] = _mm256_unpackhi_epi64(quads[i], quads[4 + i]);
    }
}

/* Load 8 numbers of each block. */
AVX2 static inline V load_both(const int16_t *a, const int16_t *b) {
    __m128i low = _mm_loadu_si128((const __m128i *)a);
    __m128i high = _mm_loadu_si128((const __m128i *)b);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

AVX2 static inline void store_two_rows(const Block *block, int row, __m128i rows) {
    uint8_t *to = block->samples + row * block->stride;
    uint8_t *below = block->samples + (row + 1) * block->stride;
    _mm_storel_epi64((__m128i *)to, rows);
    _mm_storel_epi64((__m128i *)below, _mm_unpackhi_epi64(rows, rows));
}

AVX2 static void idct_pair_avx2(const Block *a, const Block *b) {
    V x[8];
    V zero = _mm256_setzero_si256();
    V below_first = zero;
    for (int i = 0; i < 8; i++) {
        V row = load_both(a->coefficients + 8 * i, b->coefficients + 8 * i);
        if (i) below_first = _mm256_or_si256(below_first, row);
        x[i] = _mm256_mullo_epi16(row, load_both(a->quantisation + 8 * i, b->quantisation + 8 * i));
    }
    /* All ones in the half of a block that is zero below its first row. */
    V empty = _mm256_cmpeq_epi64(below_first, zero);
    empty = _mm256_and_si256(empty, _mm256_shuffle_epi32(empty, 0x4E));
    V first = _mm256_slli_epi16(x[0], PASS1_BITS);
    idct_lines_avx2(x, PASS1_SHIFT);
    for (int i = 0; i < 8; i++) x[i] = _mm256_blendv_epi8(x[i], first, empty);
    transpose_avx2(x);
    idct_lines_avx2(x, PASS2_SHIFT);
    /* Now x[j] is column j. Narrow first, because transposing bytes needs half the shuffles. */
    V c04 = _mm256_packs_epi16(x[0], x[4]);
    V c15 = _mm256_packs_epi16(x[1], x[5]);
    V c26 = _mm256_packs_epi16(x[2], x[6]);
    V c37 = _mm256_packs_epi16(x[3], x[7]);
    V c02 = _mm256_unpacklo_epi8(c04, c26);
    V c46 = _mm256_unpackhi_epi8(c04, c26);
    V c13 = _mm256_unpacklo_epi8(c15, c37);
    V c57 = _mm256_unpackhi_epi8(c15, c37);
    /* columns 0-3 and 4-7 of rows 0-3 and 4-7 */
    V left[2] = {_mm256_unpacklo_epi8(c02, c13), _mm256_unpackhi_epi8(c02, c13)};
    V right[2] = {_mm256_unpacklo_epi8(c46, c57), _mm256_unpackhi_epi8(c46, c57)};
    V center = _mm256_set1_epi8(-128);
    for (int i = 0; i < 2; i++) {
        V upper = _mm256_add_epi8(_mm256_unpacklo_epi32(left[i], right[i]), center);
        V lower = _mm256_add_epi8(_mm256_unpackhi_epi32(left[i], right[i]), center);
        store_two_rows(a, 4 * i, _mm256_castsi256_si128(upper));
        store_two_rows(a, 4 * i + 2, _mm256_castsi256_si128(lower));
        store_two_rows(b, 4 * i, _mm256_extracti128_si256(upper, 1));
        store_two_rows(b, 4 * i + 2, _mm256_extracti128_si256(lower, 1));
    }
}

/* ---- upsampling ----------------------------------------------------------------------------- */

/* Load 16 samples as 16-bit numbers. */
AVX2 static inline V load_16(const uint8_t *p) {
    return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
}

AVX2 static inline V triple(V x) { return _mm256_add_epi16(x, _mm256_slli_epi16(x, 1)); }

/* Store even and odd samples, 16-bit numbers below 256, alternately. */
AVX2 static inline void store_interleaved(uint8_t *out, V even, V odd) {
    _mm256_storeu_si256((V *)out, _mm256_or_si256(even, _mm256_slli_epi16(odd, 8)));
}

AVX2 static void upsample_h2v1_avx2(const uint8_t *near, uint8_t *out, int n) {
    for (int i = 0; i < n; i += 16) {
        V here = triple(load_16(near + i));
        V previous = load_16(near + i - 1);
        V next = load_16(near + i + 1);
        V even = _mm256_add_epi16(_mm256_add_epi16(here, previous), _mm256_set1_epi16(1));
        V odd = _mm256_add_epi16(_mm256_add_epi16(here, next), _mm256_set1_epi16(2));
        store_interleaved(out + 2 * i, _mm256_srli_epi16(even, 2), _mm256_srli_epi16(odd, 2));
    }
}

/* Return 3 * near + far. */
AVX2 static inline V blend_16(const uint8_t *near, const uint8_t *far) {
    return _mm256_add_epi16(triple(load_16(near)), load_16(far));
}

AVX2 static void upsample_h2v2_avx2(const uint8_t *near, const uint8_t *far, uint8_t *out, int n) {
    for (int i = 0; i < n; i += 16) {
        V here = triple(blend_16(near + i, far + i));
        V previous = blend_16(near + i - 1, far + i - 1);
        V next = blend_16(near + i + 1, far + i + 1);
        V even = _mm256_add_epi16(_mm256_add_epi16(here, previous), _mm256_set1_epi16(8));
        V odd = _mm256_add_epi16(_mm256_add_epi16(here, next), _mm256_set1_epi16(7));
        store_interleaved(out + 2 * i, _mm256_srli_epi16(even, 4), _mm256_srli_epi16(odd, 4));
    }
}

AVX2 static void upsample_h1v2_avx2(const uint8_t *near, const uint8_t *far, uint8_t *out, int n,
                                    int bias) {
    V biases = _mm256_set1_epi16((int16_t)bias);
    for (int i = 0; i < n; i += 16) {
        V sum = _mm256_srli_epi16(_mm256_add_epi16(blend_16(near + i, far + i), biases), 2);
        __m128i low = _mm256_castsi256_si128(sum);
        __m128i high = _mm256_extracti128_si256(sum, 1);
        _mm_storeu_si128((__m128i *)(out + i), _mm_packus_epi16(low, high));
    }
}

/* ---- colors --------------------------------------------------------------------------------- */

/* Return x * factor / 65536, rounded as (x * factor + HALF) >> 16; |x| <= 128. */
AVX2 static inline V scaled(V x, int factor) {
    V twice = _mm256_mulhi_epi16(_mm256_add_epi16(x, x), _mm256_set1_epi16((int16_t)factor));
    return _mm256_srai_epi16(_mm256_add_epi16(twice, _mm256_set1_epi16(1)), 1);
}

typedef struct {
    V r, g, b;
} Rgb;

/* Convert 16 pixels to 16-bit numbers that are not yet clamped.
 *
 * The integer parts of the factors are added separately, so that the remainders fit in 16 bits.
 */
AVX2 static inline Rgb colors(V y, V cb, V cr) {
    cb = _mm256_sub_epi16(cb, _mm256_set1_epi16(128));
    cr = _mm256_sub_epi16(cr, _mm256_set1_epi16(128));
    V r = _mm256_add_epi16(_mm256_add_epi16(y, cr), scaled(cr, CR_TO_R - 65536));
    V twice_cb = _mm256_add_epi16(cb, cb);
    V b = _mm256_add_epi16(_mm256_add_epi16(y, twice_cb), scaled(cb, CB_TO_B - 2 * 65536));
    V half = _mm256_set1_epi32(HALF);
    V factors = PAIR(-CB_TO_G, 65536 - CR_TO_G);
    V low = _mm256_add_epi32(_mm256_madd_epi16(_mm256_unpacklo_epi16(cb, cr), factors), half);
    V high = _mm256_add_epi32(_mm256_madd_epi16(_mm256_unpackhi_epi16(cb, cr), factors), half);
    V g = _mm256_packs_epi32(_mm256_srai_epi32(low, 16), _mm256_srai_epi32(high, 16));
    return (Rgb){r, _mm256_add_epi16(y, _mm256_sub_epi16(g, cr)), b};
}

/* The index with which `_mm256_shuffle_epi8` makes byte i of 16 interleaved bytes. These are bytes
 * `start` to `start` + 15 of a row. The index is pixel (start + i) / 3 if the byte is of this plane
 * (0, 1, 2: R, G, B), otherwise 0x80, which produces zero. */
#define TURN(plane, start, i) \
    (((start) + (i)) % 3 == (plane) ? (char)(((start) + (i)) / 3) : (char)0x80)
#define TURNS_4(plane, s, i) \
    TURN(plane, s, i), TURN(plane, s, i + 1), TURN(plane, s, i + 2), TURN(plane, s, i + 3)
#define TURNS_16(plane, s) \
    TURNS_4(plane, s, 0), TURNS_4(plane, s, 4), TURNS_4(plane, s, 8), TURNS_4(plane, s, 12)
#define TURNS(plane, s) _mm256_setr_epi8(TURNS_16(plane, s), TURNS_16(plane, s))

AVX2 static inline V interleaved(V r, V g, V b, V turn_r, V turn_g, V turn_b) {
    V r_and_g = _mm256_or_si256(_mm256_shuffle_epi8(r, turn_r), _mm256_shuffle_epi8(g, turn_g));
    return _mm256_or_si256(r_and_g, _mm256_shuffle_epi8(b, turn_b));
}

/* Store 32 pixels, 96 bytes. */
AVX2 static inline void store_rgb(uint8_t *rgb, V r, V g, V b) {
    /* bytes 0-15, 16-31, 32-47 of pixels 0-15 (low half) and of pixels 16-31 (high half) */
    V first = interleaved(r, g, b, TURNS(0, 0), TURNS(1, 0), TURNS(2, 0));
    V second = interleaved(r, g, b, TURNS(0, 16), TURNS(1, 16), TURNS(2, 16));
    V third = interleaved(r, g, b, TURNS(0, 32), TURNS(1, 32), TURNS(2, 32));
    _mm256_storeu_si256((V *)rgb, _mm256_permute2x128_si256(first, second, 0x20));
    _mm256_storeu_si256((V *)(rgb + 32), _mm256_permute2x128_si256(third, first, 0x30));
    _mm256_storeu_si256((V *)(rgb + 64), _mm256_permute2x128_si256(second, third, 0x31));
}

AVX2 static inline void ycc_to_rgb_32(const uint8_t *y, const uint8_t *cb, const uint8_t *cr,
                                      uint8_t *rgb) {
    Rgb low = colors(load_16(y), load_16(cb), load_16(cr));
    Rgb high = colors(load_16(y + 16), load_16(cb + 16), load_16(cr + 16));
    /* packus works on halves: its result has pixels 0-7, 16-23, 8-15, 24-31 */
    V r = _mm256_permute4x64_epi64(_mm256_packus_epi16(low.r, high.r), 0xD8);
    V g = _mm256_permute4x64_epi64(_mm256_packus_epi16(low.g, high.g), 0xD8);
    V b = _mm256_permute4x64_epi64(_mm256_packus_epi16(low.b, high.b), 0xD8);
    store_rgb(rgb, r, g, b);
}

AVX2 static void ycc_to_rgb_avx2(const uint8_t *y, const uint8_t *cb, const uint8_t *cr,
                                 uint8_t *rgb, int n) {
    int i = 0;
    for (; i + 32 <= n; i += 32) ycc_to_rgb_32(y + i, cb + i, cr + i, rgb + 3 * i);
    if (i == n) return;
    uint8_t last[96]; /* the row may be the caller's last one, so never write beyond it */
    ycc_to_rgb_32(y + i, cb + i, cr + i, last);
    memcpy(rgb + 3 * i, last, 3 * (size_t)(n - i));
}

/* ---- segments ------------------------------------------------------------------------------- */

AVX2 static uint8_t *copy_segment_avx2(const uint8_t **from, const uint8_t *end, uint8_t *to) {
    const uint8_t *p = *from;
    while (end - p >= 34) {
        V bytes = _mm256_loadu_si256((const V *)p);
        V is_ff = _mm256_cmpeq_epi8(bytes, _mm256_set1_epi8(-1));
        uint32_t ff = (uint32_t)_mm256_movemask_epi8(is_ff);
        _mm256_storeu_si256((V *)to, bytes);
        if (!ff) {
            p += 32;
            to += 32;
            continue;
        }
        uint32_t before = (uint32_t)__builtin_ctz(ff);
        p += before;
        to += before;
        if (p[1] != 0) {
            *from = p;
            return to;
        }
        p += 2;
        to += 1;
    }
    *from = p;
    return jpeg_unstuff(from, end, to);
}

static const Kernels KERNELS_AVX2 = {
    .idct_pair = idct_pair_avx2,
    .upsample_h2v1 = upsample_h2v1_avx2,
    .upsample_h2v2 = upsample_h2v2_avx2,
    .upsample_h1v2 = upsample_h1v2_avx2,
    .ycc_to_rgb = ycc_to_rgb_avx2,
    .copy_segment = copy_segment_avx2,
};

#endif

#endif
