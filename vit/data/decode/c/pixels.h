/* Coefficients to pixels, bit for bit as libjpeg-turbo makes them: inverse DCT, chroma upsampling, colour conversion.
 *
 * The data's story: a block of 64 quantised coefficients becomes 8 x 8 samples of one component (two blocks at a time, as one AVX2 register
 * holds a row of both). When a window's samples are there, each of its rows is made from one luma row and the rows of chroma around it: the
 * chroma row is stretched to the luma's width, then three rows of samples become one row of RGB.
 *
 * Each kernel exists twice: in plain C, for every processor, and in AVX2. Both give the same bytes for any input, and so does libjpeg-turbo
 * on x86, also where coefficients are so large (only in damaged files) that its 16-bit arithmetic wraps or saturates.
 *
 * Sources: C. Loeffler, A. Ligtenberg, G. Moschytz, "Practical fast 1-D DCT algorithms with 11 multiplications", 1989, in the fixed-point
 * form of libjpeg-turbo (src/jidctint.c, simd/x86_64/jidctint-sse2.asm); the triangle filter and its rounding: src/jdsample.c; colours:
 * ITU-T T.871 (JFIF), section 7, in the 16-bit fixed point of src/jdcolor.c.
 */
#ifndef VIT_NATIVE_PIXELS_H
#define VIT_NATIVE_PIXELS_H

#include "jpeg.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>
#define HAVE_AVX2_KERNELS 1
#define AVX2 __attribute__((target("avx2")))
#else
#define HAVE_AVX2_KERNELS 0
#endif

enum {
    COPY_SLACK = 64, /* bytes that `copy_segment` may write behind what it copies */
    ROW_PAD = 32,    /* bytes that a kernel may read before and behind the samples it is given; rows it makes may grow by as much */
};

typedef struct {
    const int16_t *coefficients; /* 64, natural order */
    const int16_t *quantisation; /* 64, natural order, 1 to 255 */
    uint8_t *samples;            /* where its upper left sample goes */
    ptrdiff_t stride;            /* bytes from one row of samples to the next */
} Block;

/* What is done with many bytes, in one of the two implementations. `near` and `far` are chroma rows: the nearer and the farther one. */
typedef struct {
    void (*idct_pair)(const Block *a, const Block *b);
    /* Twice as wide: 2 * n samples out of samples -1 .. n of the row(s). */
    void (*stretch)(const uint8_t *near, uint8_t *out, int n);
    void (*blend_stretch)(const uint8_t *near, const uint8_t *far, uint8_t *out, int n);
    /* As wide, between two rows; bias 1 in the upper one of two rows, 2 in the lower one. */
    void (*blend)(const uint8_t *near, const uint8_t *far, uint8_t *out, int n, int bias);
    void (*ycc_to_rgb)(const uint8_t *y, const uint8_t *cb, const uint8_t *cr, uint8_t *rgb, int n);
    /* As `jpeg_unstuff`, but COPY_SLACK bytes behind the copy may be written, too. */
    uint8_t *(*copy_segment)(const uint8_t **from, const uint8_t *end, uint8_t *to);
} Kernels;

/* ---- inverse DCT ------------------------------------------------------------------------------------------------------------------ */

/* Cosines in 13-bit fixed point, under the names of jidctint.c. All sums below stay inside 32 bits for any 16-bit input. */
enum {
    FIX_0_298631336 = 2446, FIX_0_390180644 = 3196, FIX_0_541196100 = 4433, FIX_0_765366865 = 6270,
    FIX_0_899976223 = 7373, FIX_1_175875602 = 9633, FIX_1_501321110 = 12299, FIX_1_847759065 = 15137,
    FIX_1_961570560 = 16069, FIX_2_053119869 = 16819, FIX_2_562915447 = 20995, FIX_3_072711026 = 25172,
    COSINE_BITS = 13,
    PASS1_BITS = 2,                                /* fraction bits kept between the two passes */
    PASS1_SHIFT = COSINE_BITS - PASS1_BITS,        /* 11 */
    PASS2_SHIFT = COSINE_BITS + PASS1_BITS + 3     /* 18: the 2-D transform is 8 times too large */
};

/* z -> z[0] * p + z[1] * q and z[0] * r + z[1] * s: all that the transform multiplies are five such pairs of sums. */
enum {
    EVEN_3P = FIX_0_541196100 + FIX_0_765366865, EVEN_3Q = FIX_0_541196100,                   /* of in2, in6 */
    EVEN_2P = FIX_0_541196100, EVEN_2Q = FIX_0_541196100 - FIX_1_847759065,
    ODD_Z3P = FIX_1_175875602 - FIX_1_961570560, ODD_Z3Q = FIX_1_175875602,                   /* of in3 + in7, in1 + in5 */
    ODD_Z4P = FIX_1_175875602, ODD_Z4Q = FIX_1_175875602 - FIX_0_390180644,
    ODD_0P = FIX_0_298631336 - FIX_0_899976223, ODD_0Q = -FIX_0_899976223,                    /* of in7, in1 */
    ODD_3P = -FIX_0_899976223, ODD_3Q = FIX_1_501321110 - FIX_0_899976223,
    ODD_1P = FIX_2_053119869 - FIX_2_562915447, ODD_1Q = -FIX_2_562915447,                    /* of in5, in3 */
    ODD_2P = -FIX_2_562915447, ODD_2Q = FIX_3_072711026 - FIX_2_562915447
};

static inline uint8_t clamp8(int32_t x) { return (uint8_t)(x < 0 ? 0 : x > 255 ? 255 : x); }

/* 4 lines at once, in the vectors that nearly every processor has. */
typedef int32_t Lines __attribute__((vector_size(16)));

#define WRAP_16(x) (((x) << 16) >> 16)
#define WHERE(mask, a, b) (((a) & (mask)) | ((b) & ~(mask)))
#define SATURATE_16(x) WHERE((x) > 32767, (Lines){} + 32767, WHERE((x) < -32768, (Lines){} - 32768, (x)))

/* One pass, in place: x[position in the line]. */
static inline void idct_lines(Lines x[8], int shift) {
    Lines even0 = WRAP_16(x[0] + x[4]) << COSINE_BITS, even1 = WRAP_16(x[0] - x[4]) << COSINE_BITS;
    Lines even3 = x[2] * EVEN_3P + x[6] * EVEN_3Q, even2 = x[2] * EVEN_2P + x[6] * EVEN_2Q;
    Lines sum0 = even0 + even3, sum3 = even0 - even3, sum1 = even1 + even2, sum2 = even1 - even2;
    Lines z3 = WRAP_16(x[3] + x[7]), z4 = WRAP_16(x[1] + x[5]);
    Lines turn3 = z3 * ODD_Z3P + z4 * ODD_Z3Q, turn4 = z3 * ODD_Z4P + z4 * ODD_Z4Q;
    Lines odd0 = x[7] * ODD_0P + x[1] * ODD_0Q + turn3, odd1 = x[5] * ODD_1P + x[3] * ODD_1Q + turn4;
    Lines odd2 = x[5] * ODD_2P + x[3] * ODD_2Q + turn3, odd3 = x[7] * ODD_3P + x[1] * ODD_3Q + turn4;
    x[0] = sum0 + odd3, x[7] = sum0 - odd3, x[1] = sum1 + odd2, x[6] = sum1 - odd2;
    x[2] = sum2 + odd1, x[5] = sum2 - odd1, x[3] = sum3 + odd0, x[4] = sum3 - odd0;
    for (int i = 0; i < 8; i++) {
        Lines y = (x[i] + (1 << (shift - 1))) >> shift;
        x[i] = SATURATE_16(y);
    }
}

/* A pass over 8 lines: from [position][line] to [line][position]. */
static inline void idct_pass(const int32_t in[8][8], int32_t out[8][8], int shift) {
    for (int half = 0; half < 8; half += 4) {
        Lines x[8];
        for (int i = 0; i < 8; i++) memcpy(&x[i], &in[i][half], sizeof x[i]);
        idct_lines(x, shift);
        for (int i = 0; i < 8; i++)
            for (int line = 0; line < 4; line++) out[half + line][i] = x[i][line];
    }
}

static void idct_block_c(const Block *block) {
    int32_t columns[8][8], rows[8][8], below_first = 0; /* [row][column], [column][row] */
    for (int i = 0; i < 64; i++) columns[i / 8][i % 8] = (int16_t)(block->coefficients[i] * block->quantisation[i]);
    for (int i = 8; i < 64; i++) below_first |= block->coefficients[i];
    idct_pass(columns, rows, PASS1_SHIFT);
    if (!below_first) /* libjpeg-turbo's short cut; it differs from the pass only in that it wraps where the pass saturates */
        for (int i = 0; i < 64; i++) rows[i / 8][i % 8] = (int16_t)(columns[0][i / 8] * (1 << PASS1_BITS));
    idct_pass(rows, columns, PASS2_SHIFT);
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 8; j++) block->samples[i * block->stride + j] = clamp8(columns[i][j] + 128);
}

static void idct_pair_c(const Block *a, const Block *b) { idct_block_c(a), idct_block_c(b); }

/* ---- upsampling: the triangle filter ---------------------------------------------------------------------------------------------- */

static void stretch_c(const uint8_t *near, uint8_t *out, int n) {
    for (int i = 0; i < n; i++) {
        out[2 * i] = (uint8_t)((3 * near[i] + near[i - 1] + 1) >> 2);
        out[2 * i + 1] = (uint8_t)((3 * near[i] + near[i + 1] + 2) >> 2);
    }
}

static void blend_stretch_c(const uint8_t *near, const uint8_t *far, uint8_t *out, int n) {
    int last = 3 * near[-1] + far[-1], here = 3 * near[0] + far[0];
    for (int i = 0; i < n; i++) {
        int next = 3 * near[i + 1] + far[i + 1];
        out[2 * i] = (uint8_t)((3 * here + last + 8) >> 4);
        out[2 * i + 1] = (uint8_t)((3 * here + next + 7) >> 4);
        last = here, here = next;
    }
}

static void blend_c(const uint8_t *near, const uint8_t *far, uint8_t *out, int n, int bias) {
    for (int i = 0; i < n; i++) out[i] = (uint8_t)((3 * near[i] + far[i] + bias) >> 2);
}

/* ---- colours ---------------------------------------------------------------------------------------------------------------------- */

/* JFIF's factors in 16-bit fixed point; R = Y + 1.402 Cr', G = Y - 0.34414 Cb' - 0.71414 Cr', B = Y + 1.772 Cb' with C' = C - 128. */
enum { CR_TO_R = 91881, CB_TO_G = 22554, CR_TO_G = 46802, CB_TO_B = 116130, HALF = 1 << 15 };

static void ycc_to_rgb_c(const uint8_t *y, const uint8_t *cb, const uint8_t *cr, uint8_t *rgb, int n) {
    for (int i = 0; i < n; i++) {
        int b = cb[i] - 128, r = cr[i] - 128;
        rgb[3 * i] = clamp8(y[i] + ((CR_TO_R * r + HALF) >> 16));
        rgb[3 * i + 1] = clamp8(y[i] + ((HALF - CB_TO_G * b - CR_TO_G * r) >> 16));
        rgb[3 * i + 2] = clamp8(y[i] + ((CB_TO_B * b + HALF) >> 16));
    }
}

static void interleave_c(const uint8_t *r, const uint8_t *g, const uint8_t *b, uint8_t *rgb, int n) {
    for (int i = 0; i < n; i++) rgb[3 * i] = r[i], rgb[3 * i + 1] = g[i], rgb[3 * i + 2] = b[i];
}

static const Kernels KERNELS_C = {
    .idct_pair = idct_pair_c, .stretch = stretch_c, .blend_stretch = blend_stretch_c, .blend = blend_c, .ycc_to_rgb = ycc_to_rgb_c,
    .copy_segment = jpeg_unstuff,
};

/* ---- the same in AVX2 ------------------------------------------------------------------------------------------------------------- */

#if HAVE_AVX2_KERNELS

typedef __m256i V;
#define PAIR(p, q) _mm256_set1_epi32((int)((uint32_t)(uint16_t)(p) | (uint32_t)(uint16_t)(q) << 16)) /* for madd: x * p + y * q */

/* One pass for both blocks; x[r] holds position r of 8 lines of block a (low half) and of block b (high half). */
AVX2 static inline __attribute__((always_inline)) void idct_lines_avx2(V x[8], const int shift) {
    V out_lo[8], out_hi[8], half = _mm256_set1_epi32(1 << (shift - 1));
    V even = _mm256_add_epi16(x[0], x[4]), diff = _mm256_sub_epi16(x[0], x[4]);
    V z3 = _mm256_add_epi16(x[3], x[7]), z4 = _mm256_add_epi16(x[1], x[5]);
#define HALF_PASS(UNPACK, OUT)                                                                                                          \
    {                                                                                                                                     \
        V in26 = UNPACK(x[2], x[6]), in71 = UNPACK(x[7], x[1]), in53 = UNPACK(x[5], x[3]), z34 = UNPACK(z3, z4);                           \
        V even0 = _mm256_srai_epi32(UNPACK(_mm256_setzero_si256(), even), 16 - COSINE_BITS);                                               \
        V even1 = _mm256_srai_epi32(UNPACK(_mm256_setzero_si256(), diff), 16 - COSINE_BITS);                                               \
        V even3 = _mm256_madd_epi16(in26, PAIR(EVEN_3P, EVEN_3Q)), even2 = _mm256_madd_epi16(in26, PAIR(EVEN_2P, EVEN_2Q));                \
        even0 = _mm256_add_epi32(even0, half), even1 = _mm256_add_epi32(even1, half);                                                      \
        V sum0 = _mm256_add_epi32(even0, even3), sum3 = _mm256_sub_epi32(even0, even3);                                                    \
        V sum1 = _mm256_add_epi32(even1, even2), sum2 = _mm256_sub_epi32(even1, even2);                                                    \
        V turn3 = _mm256_madd_epi16(z34, PAIR(ODD_Z3P, ODD_Z3Q)), turn4 = _mm256_madd_epi16(z34, PAIR(ODD_Z4P, ODD_Z4Q));                  \
        V odd0 = _mm256_add_epi32(_mm256_madd_epi16(in71, PAIR(ODD_0P, ODD_0Q)), turn3);                                                   \
        V odd1 = _mm256_add_epi32(_mm256_madd_epi16(in53, PAIR(ODD_1P, ODD_1Q)), turn4);                                                   \
        V odd2 = _mm256_add_epi32(_mm256_madd_epi16(in53, PAIR(ODD_2P, ODD_2Q)), turn3);                                                   \
        V odd3 = _mm256_add_epi32(_mm256_madd_epi16(in71, PAIR(ODD_3P, ODD_3Q)), turn4);                                                   \
        OUT[0] = _mm256_add_epi32(sum0, odd3), OUT[7] = _mm256_sub_epi32(sum0, odd3);                                                      \
        OUT[1] = _mm256_add_epi32(sum1, odd2), OUT[6] = _mm256_sub_epi32(sum1, odd2);                                                      \
        OUT[2] = _mm256_add_epi32(sum2, odd1), OUT[5] = _mm256_sub_epi32(sum2, odd1);                                                      \
        OUT[3] = _mm256_add_epi32(sum3, odd0), OUT[4] = _mm256_sub_epi32(sum3, odd0);                                                      \
        for (int i = 0; i < 8; i++) OUT[i] = _mm256_srai_epi32(OUT[i], shift);                                                             \
    }
    HALF_PASS(_mm256_unpacklo_epi16, out_lo)
    HALF_PASS(_mm256_unpackhi_epi16, out_hi)
#undef HALF_PASS
    for (int i = 0; i < 8; i++) x[i] = _mm256_packs_epi32(out_lo[i], out_hi[i]);
}

/* 8 x 8 inside each half. */
AVX2 static inline __attribute__((always_inline)) void transpose_avx2(V x[8]) {
    V pairs[8], quads[8];
    for (int i = 0; i < 4; i++) {
        pairs[2 * i] = _mm256_unpacklo_epi16(x[2 * i], x[2 * i + 1]); /* columns 0-3 of rows 2i, 2i + 1 */
        pairs[2 * i + 1] = _mm256_unpackhi_epi16(x[2 * i], x[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 2; j++) {
            /* columns 4j, 4j + 1 and 4j + 2, 4j + 3 of rows 4i to 4i + 3 */
            quads[4 * i + 2 * j] = _mm256_unpacklo_epi32(pairs[4 * i + j], pairs[4 * i + 2 + j]);
            quads[4 * i + 2 * j + 1] = _mm256_unpackhi_epi32(pairs[4 * i + j], pairs[4 * i + 2 + j]);
        }
    for (int i = 0; i < 4; i++) {
        x[2 * i] = _mm256_unpacklo_epi64(quads[i], quads[4 + i]);
        x[2 * i + 1] = _mm256_unpackhi_epi64(quads[i], quads[4 + i]);
    }
}

AVX2 static inline V load_both(const int16_t *a, const int16_t *b) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)a)), _mm_loadu_si128((const __m128i *)b), 1);
}

AVX2 static inline void store_two_rows(const Block *block, int row, __m128i rows) {
    _mm_storel_epi64((__m128i *)(block->samples + row * block->stride), rows);
    _mm_storel_epi64((__m128i *)(block->samples + (row + 1) * block->stride), _mm_unpackhi_epi64(rows, rows));
}

AVX2 static void idct_pair_avx2(const Block *a, const Block *b) {
    V x[8], below_first = _mm256_setzero_si256();
    for (int i = 0; i < 8; i++) {
        V row = load_both(a->coefficients + 8 * i, b->coefficients + 8 * i);
        if (i) below_first = _mm256_or_si256(below_first, row);
        x[i] = _mm256_mullo_epi16(row, load_both(a->quantisation + 8 * i, b->quantisation + 8 * i));
    }
    V empty = _mm256_cmpeq_epi64(below_first, _mm256_setzero_si256()), first = _mm256_slli_epi16(x[0], PASS1_BITS);
    empty = _mm256_and_si256(empty, _mm256_shuffle_epi32(empty, 0x4E)); /* all ones in the half of a block with its first row only */
    idct_lines_avx2(x, PASS1_SHIFT);
    for (int i = 0; i < 8; i++) x[i] = _mm256_blendv_epi8(x[i], first, empty);
    transpose_avx2(x);
    idct_lines_avx2(x, PASS2_SHIFT);
    /* x[j] is column j now. Narrow to bytes first: transposing bytes takes half the shuffles. */
    V c04 = _mm256_packs_epi16(x[0], x[4]), c15 = _mm256_packs_epi16(x[1], x[5]);
    V c26 = _mm256_packs_epi16(x[2], x[6]), c37 = _mm256_packs_epi16(x[3], x[7]);
    V c02 = _mm256_unpacklo_epi8(c04, c26), c46 = _mm256_unpackhi_epi8(c04, c26);
    V c13 = _mm256_unpacklo_epi8(c15, c37), c57 = _mm256_unpackhi_epi8(c15, c37);
    V left[2] = {_mm256_unpacklo_epi8(c02, c13), _mm256_unpackhi_epi8(c02, c13)};  /* columns 0-3 of rows 0-3, rows 4-7 */
    V right[2] = {_mm256_unpacklo_epi8(c46, c57), _mm256_unpackhi_epi8(c46, c57)}; /* columns 4-7 */
    for (int i = 0; i < 2; i++) {
        V upper = _mm256_add_epi8(_mm256_unpacklo_epi32(left[i], right[i]), _mm256_set1_epi8(-128));
        V lower = _mm256_add_epi8(_mm256_unpackhi_epi32(left[i], right[i]), _mm256_set1_epi8(-128));
        store_two_rows(a, 4 * i, _mm256_castsi256_si128(upper)), store_two_rows(a, 4 * i + 2, _mm256_castsi256_si128(lower));
        store_two_rows(b, 4 * i, _mm256_extracti128_si256(upper, 1)), store_two_rows(b, 4 * i + 2, _mm256_extracti128_si256(lower, 1));
    }
}

AVX2 static inline V load_16(const uint8_t *p) { return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p)); }
AVX2 static inline V triple(V x) { return _mm256_add_epi16(x, _mm256_slli_epi16(x, 1)); }

/* The last step of both stretches: even and odd samples as 16-bit numbers below 256. */
AVX2 static inline void store_interleaved(uint8_t *out, V even, V odd) {
    _mm256_storeu_si256((V *)out, _mm256_or_si256(even, _mm256_slli_epi16(odd, 8)));
}

AVX2 static void stretch_avx2(const uint8_t *near, uint8_t *out, int n) {
    for (int i = 0; i < n; i += 16) {
        V here = triple(load_16(near + i)), last = load_16(near + i - 1), next = load_16(near + i + 1);
        V even = _mm256_srli_epi16(_mm256_add_epi16(_mm256_add_epi16(here, last), _mm256_set1_epi16(1)), 2);
        V odd = _mm256_srli_epi16(_mm256_add_epi16(_mm256_add_epi16(here, next), _mm256_set1_epi16(2)), 2);
        store_interleaved(out + 2 * i, even, odd);
    }
}

AVX2 static inline V blend_16(const uint8_t *near, const uint8_t *far) { return _mm256_add_epi16(triple(load_16(near)), load_16(far)); }

AVX2 static void blend_stretch_avx2(const uint8_t *near, const uint8_t *far, uint8_t *out, int n) {
    for (int i = 0; i < n; i += 16) {
        V here = triple(blend_16(near + i, far + i));
        V last = blend_16(near + i - 1, far + i - 1), next = blend_16(near + i + 1, far + i + 1);
        V even = _mm256_srli_epi16(_mm256_add_epi16(_mm256_add_epi16(here, last), _mm256_set1_epi16(8)), 4);
        V odd = _mm256_srli_epi16(_mm256_add_epi16(_mm256_add_epi16(here, next), _mm256_set1_epi16(7)), 4);
        store_interleaved(out + 2 * i, even, odd);
    }
}

AVX2 static void blend_avx2(const uint8_t *near, const uint8_t *far, uint8_t *out, int n, int bias) {
    for (int i = 0; i < n; i += 16) {
        V sum = _mm256_srli_epi16(_mm256_add_epi16(blend_16(near + i, far + i), _mm256_set1_epi16((int16_t)bias)), 2);
        _mm_storeu_si128((__m128i *)(out + i), _mm_packus_epi16(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1)));
    }
}

/* x * factor / 65536, rounded as (x * factor + HALF) >> 16 does; |x| <= 128. */
AVX2 static inline V scaled(V x, int factor) {
    V twice = _mm256_mulhi_epi16(_mm256_add_epi16(x, x), _mm256_set1_epi16((int16_t)factor));
    return _mm256_srai_epi16(_mm256_add_epi16(twice, _mm256_set1_epi16(1)), 1);
}

typedef struct {
    V r, g, b;
} Rgb;

/* 16 pixels as 16-bit numbers, not yet clamped. The factors' whole parts are added apart, so that the rest fits 16 bits. */
AVX2 static inline Rgb colours(V y, V cb, V cr) {
    cb = _mm256_sub_epi16(cb, _mm256_set1_epi16(128)), cr = _mm256_sub_epi16(cr, _mm256_set1_epi16(128));
    V r = _mm256_add_epi16(_mm256_add_epi16(y, cr), scaled(cr, CR_TO_R - 65536));
    V b = _mm256_add_epi16(_mm256_add_epi16(y, _mm256_add_epi16(cb, cb)), scaled(cb, CB_TO_B - 2 * 65536));
    V half = _mm256_set1_epi32(HALF), factors = PAIR(-CB_TO_G, 65536 - CR_TO_G);
    V lo = _mm256_add_epi32(_mm256_madd_epi16(_mm256_unpacklo_epi16(cb, cr), factors), half);
    V hi = _mm256_add_epi32(_mm256_madd_epi16(_mm256_unpackhi_epi16(cb, cr), factors), half);
    V g = _mm256_sub_epi16(_mm256_packs_epi32(_mm256_srai_epi32(lo, 16), _mm256_srai_epi32(hi, 16)), cr);
    return (Rgb){r, _mm256_add_epi16(y, g), b};
}

/* Byte i of 16 interleaved bytes comes from pixel (start + i) / 3 of the plane whose turn it is; 0x80 (zero) elsewhere. */
#define TURN(plane, start, i) (((start) + (i)) % 3 == (plane) ? (char)(((start) + (i)) / 3) : (char)0x80)
#define TURNS_8(plane, s, i) \
    TURN(plane, s, i), TURN(plane, s, i + 1), TURN(plane, s, i + 2), TURN(plane, s, i + 3), TURN(plane, s, i + 4), TURN(plane, s, i + 5), \
            TURN(plane, s, i + 6), TURN(plane, s, i + 7)
#define TURNS(plane, s) \
    _mm256_setr_epi8(TURNS_8(plane, s, 0), TURNS_8(plane, s, 8), TURNS_8(plane, s, 0), TURNS_8(plane, s, 8)) /* the same in both halves */

AVX2 static inline V interleaved(V r, V g, V b, V turn_r, V turn_g, V turn_b) {
    return _mm256_or_si256(_mm256_or_si256(_mm256_shuffle_epi8(r, turn_r), _mm256_shuffle_epi8(g, turn_g)), _mm256_shuffle_epi8(b, turn_b));
}

/* 32 pixels: 96 bytes. */
AVX2 static inline void store_rgb(uint8_t *rgb, V r, V g, V b) {
    V first = interleaved(r, g, b, TURNS(0, 0), TURNS(1, 0), TURNS(2, 0)); /* bytes 0-15 of pixels 0-15 and of pixels 16-31 */
    V second = interleaved(r, g, b, TURNS(0, 16), TURNS(1, 16), TURNS(2, 16));
    V third = interleaved(r, g, b, TURNS(0, 32), TURNS(1, 32), TURNS(2, 32));
    _mm256_storeu_si256((V *)rgb, _mm256_permute2x128_si256(first, second, 0x20));
    _mm256_storeu_si256((V *)(rgb + 32), _mm256_permute2x128_si256(third, first, 0x30));
    _mm256_storeu_si256((V *)(rgb + 64), _mm256_permute2x128_si256(second, third, 0x31));
}

AVX2 static inline void ycc_to_rgb_32(const uint8_t *y, const uint8_t *cb, const uint8_t *cr, uint8_t *rgb) {
    Rgb lo = colours(load_16(y), load_16(cb), load_16(cr)), hi = colours(load_16(y + 16), load_16(cb + 16), load_16(cr + 16));
    /* packus works in halves: its result holds pixels 0-7, 16-23, 8-15, 24-31 */
    V r = _mm256_permute4x64_epi64(_mm256_packus_epi16(lo.r, hi.r), 0xD8);
    V g = _mm256_permute4x64_epi64(_mm256_packus_epi16(lo.g, hi.g), 0xD8);
    V b = _mm256_permute4x64_epi64(_mm256_packus_epi16(lo.b, hi.b), 0xD8);
    store_rgb(rgb, r, g, b);
}

AVX2 static void ycc_to_rgb_avx2(const uint8_t *y, const uint8_t *cb, const uint8_t *cr, uint8_t *rgb, int n) {
    int i = 0;
    for (; i + 32 <= n; i += 32) ycc_to_rgb_32(y + i, cb + i, cr + i, rgb + 3 * i);
    if (i == n) return;
    uint8_t last[96]; /* the row's end: nothing may be written behind it */
    ycc_to_rgb_32(y + i, cb + i, cr + i, last);
    memcpy(rgb + 3 * i, last, 3 * (size_t)(n - i));
}

AVX2 static uint8_t *copy_segment_avx2(const uint8_t **from, const uint8_t *end, uint8_t *to) {
    const uint8_t *p = *from;
    while (end - p >= 34) {
        V bytes = _mm256_loadu_si256((const V *)p);
        uint32_t ff = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes, _mm256_set1_epi8(-1)));
        _mm256_storeu_si256((V *)to, bytes);
        if (!ff) {
            p += 32, to += 32;
            continue;
        }
        uint32_t before = (uint32_t)__builtin_ctz(ff);
        p += before, to += before;
        if (p[1] != 0) return *from = p, to;
        p += 2, to += 1;
    }
    *from = p;
    return jpeg_unstuff(from, end, to);
}

static const Kernels KERNELS_AVX2 = {
    .idct_pair = idct_pair_avx2, .stretch = stretch_avx2, .blend_stretch = blend_stretch_avx2, .blend = blend_avx2,
    .ycc_to_rgb = ycc_to_rgb_avx2, .copy_segment = copy_segment_avx2,
};

#endif

#endif
