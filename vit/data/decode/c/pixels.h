/* Convert coefficients to pixels by inverse DCT, upsampling and color conversion.
 *
 * The result equals libjpeg-turbo's bit for bit. A block of 64 quantized coefficients becomes 8 x 8
 * samples of one component. Two blocks are transformed together, because one AVX2 register contains
 * a row of both. When the samples of a window are complete, each of its rows is made from one luma
 * row and the adjacent chroma rows. Chroma is upsampled to the width of luma. Then three rows of
 * samples become one row of RGB.
 *
 * Each kernel exists twice: in this file in plain C for every processor, and in pixels_avx2.h in
 * AVX2. Both produce the same bytes for any input. libjpeg-turbo on x86 also produces these bytes,
 * even if coefficients are so large (only in damaged files) that its 16-bit arithmetic wraps or
 * saturates.
 *
 * Sources: C. Loeffler, A. Ligtenberg, G. Moschytz, "Practical fast 1-D DCT algorithms with 11
 * multiplications", 1989, in the fixed-point form of libjpeg-turbo (src/jidctint.c,
 * simd/x86_64/jidctint-sse2.asm); triangle filter and its rounding: src/jdsample.c; colors: ITU-T
 * T.871 (JFIF), section 7, in the 16-bit fixed point of src/jdcolor.c.
 */
#ifndef VIT_PIXELS_H
#define VIT_PIXELS_H

#include "bits.h"

enum {
    COPY_SLACK = 64, /* bytes that `copy_segment` may write after the copy */
    ROW_PAD = 32,    /* bytes that a kernel may read around its input, or write after its output */
};

typedef struct {
    const int16_t *coefficients; /* 64, natural order */
    const int16_t *quantisation; /* 64, natural order, 1 to 255 */
    uint8_t *samples;            /* the upper left one */
    ptrdiff_t stride;            /* bytes from one row of samples to the next */
} Block;

/* One implementation of the kernels. The upsampling kernels have libjpeg's names. `near` and `far`
 * are the nearer and the farther of two chroma rows. */
typedef struct {
    void (*idct_pair)(const Block *a, const Block *b);
    /* Doubles the width: 2 * n samples from samples -1 to n of one row. */
    void (*upsample_h2v1)(const uint8_t *near, uint8_t *out, int n);
    /* Doubles the width, and interpolates between two rows. */
    void (*upsample_h2v2)(const uint8_t *near, const uint8_t *far, uint8_t *out, int n);
    /* Interpolates between two rows; bias 1 for the upper of two output rows, 2 for the lower. */
    void (*upsample_h1v2)(const uint8_t *near, const uint8_t *far, uint8_t *out, int n, int bias);
    void (*ycc_to_rgb)(const uint8_t *y, const uint8_t *cb, const uint8_t *cr, uint8_t *rgb, int n);
    /* Like `jpeg_unstuff`, but may also write COPY_SLACK bytes after the copy. */
    uint8_t *(*copy_segment)(const uint8_t **from, const uint8_t *end, uint8_t *to);
} Kernels;

/* ---- inverse DCT ---------------------------------------------------------------------------- */

/* Cosines in 13-bit fixed point, with the names of jidctint.c. For any 16-bit input, all sums below
 * fit in 32 bits. */
enum {
    FIX_0_298631336 = 2446,
    FIX_0_390180644 = 3196,
    FIX_0_541196100 = 4433,
    FIX_0_765366865 = 6270,
    FIX_0_899976223 = 7373,
    FIX_1_175875602 = 9633,
    FIX_1_501321110 = 12299,
    FIX_1_847759065 = 15137,
    FIX_1_961570560 = 16069,
    FIX_2_053119869 = 16819,
    FIX_2_562915447 = 20995,
    FIX_3_072711026 = 25172,
    COSINE_BITS = 13,
    PASS1_BITS = 2,                            /* fraction bits kept between the two passes */
    PASS1_SHIFT = COSINE_BITS - PASS1_BITS,    /* 11 */
    PASS2_SHIFT = COSINE_BITS + PASS1_BITS + 3 /* 18: the 2-D transform is 8 times too large */
};

/* All products of the transform are five pairs of sums z0 * P + z1 * Q. */
enum {
    /* of in2, in6 */
    EVEN_3P = FIX_0_541196100 + FIX_0_765366865,
    EVEN_3Q = FIX_0_541196100,
    EVEN_2P = FIX_0_541196100,
    EVEN_2Q = FIX_0_541196100 - FIX_1_847759065,
    /* of in3 + in7, in1 + in5 */
    ODD_Z3P = FIX_1_175875602 - FIX_1_961570560,
    ODD_Z3Q = FIX_1_175875602,
    ODD_Z4P = FIX_1_175875602,
    ODD_Z4Q = FIX_1_175875602 - FIX_0_390180644,
    /* of in7, in1 */
    ODD_0P = FIX_0_298631336 - FIX_0_899976223,
    ODD_0Q = -FIX_0_899976223,
    ODD_3P = -FIX_0_899976223,
    ODD_3Q = FIX_1_501321110 - FIX_0_899976223,
    /* of in5, in3 */
    ODD_1P = FIX_2_053119869 - FIX_2_562915447,
    ODD_1Q = -FIX_2_562915447,
    ODD_2P = -FIX_2_562915447,
    ODD_2Q = FIX_3_072711026 - FIX_2_562915447,
};

static inline uint8_t clamp8(int32_t x) {
    if (x < 0) return 0;
    return (uint8_t)(x > 255 ? 255 : x);
}

/* Four lines in a vector that nearly every processor supports. */
typedef int32_t Lines __attribute__((vector_size(16)));

#define WRAP_16(x) (((x) << 16) >> 16)
#define WHERE(mask, a, b) (((a) & (mask)) | ((b) & ~(mask)))
#define SATURATE_16(x) \
    WHERE((x) > 32767, (Lines){} + 32767, WHERE((x) < -32768, (Lines){} - 32768, (x)))

/* Apply one pass of the transform in place: x[position in the line]. */
static inline void idct_lines(Lines x[8], int shift) {
    Lines even0 = WRAP_16(x[0] + x[4]) << COSINE_BITS;
    Lines even1 = WRAP_16(x[0] - x[4]) << COSINE_BITS;
    Lines even3 = x[2] * EVEN_3P + x[6] * EVEN_3Q;
    Lines even2 = x[2] * EVEN_2P + x[6] * EVEN_2Q;
    Lines sum0 = even0 + even3;
    Lines sum3 = even0 - even3;
    Lines sum1 = even1 + even2;
    Lines sum2 = even1 - even2;
    Lines z3 = WRAP_16(x[3] + x[7]);
    Lines z4 = WRAP_16(x[1] + x[5]);
    Lines turn3 = z3 * ODD_Z3P + z4 * ODD_Z3Q;
    Lines turn4 = z3 * ODD_Z4P + z4 * ODD_Z4Q;
    Lines odd0 = x[7] * ODD_0P + x[1] * ODD_0Q + turn3;
    Lines odd1 = x[5] * ODD_1P + x[3] * ODD_1Q + turn4;
    Lines odd2 = x[5] * ODD_2P + x[3] * ODD_2Q + turn3;
    Lines odd3 = x[7] * ODD_3P + x[1] * ODD_3Q + turn4;
    x[0] = sum0 + odd3;
    x[7] = sum0 - odd3;
    x[1] = sum1 + odd2;
    x[6] = sum1 - odd2;
    x[2] = sum2 + odd1;
    x[5] = sum2 - odd1;
    x[3] = sum3 + odd0;
    x[4] = sum3 - odd0;
    for (int i = 0; i < 8; i++) {
        Lines y = (x[i] + (1 << (shift - 1))) >> shift;
        x[i] = SATURATE_16(y);
    }
}

/* Apply one pass to 8 lines: from [position][line] to [line][position]. */
static inline void idct_pass(const int32_t in[8][8], int32_t out[8][8], int shift) {
    for (int half = 0; half < 8; half += 4) {
        Lines x[8];
        for (int i = 0; i < 8; i++) memcpy(&x[i], &in[i][half], sizeof x[i]);
        idct_lines(x, shift);
        for (int i = 0; i < 8; i++) {
            for (int line = 0; line < 4; line++) out[half + line][i] = x[i][line];
        }
    }
}

static void idct_block_c(const Block *block) {
    int32_t columns[8][8]; /* [row][column] */
    int32_t rows[8][8];    /* [column][row] */
    int32_t below_first = 0;
    for (int i = 0; i < 64; i++) {
        columns[i / 8][i % 8] = (int16_t)(block->coefficients[i] * block->quantisation[i]);
    }
    for (int i = 8; i < 64; i++) below_first |= block->coefficients[i];
    idct_pass(columns, rows, PASS1_SHIFT);
    if (!below_first) {
        /* libjpeg-turbo's shortcut: unlike the pass, it wraps where the pass saturates. */
        for (int i = 0; i < 64; i++) {
            rows[i / 8][i % 8] = (int16_t)(columns[0][i / 8] * (1 << PASS1_BITS));
        }
    }
    idct_pass(rows, columns, PASS2_SHIFT);
    for (int i = 0; i < 8; i++) {
        uint8_t *row = block->samples + i * block->stride;
        for (int j = 0; j < 8; j++) row[j] = clamp8(columns[i][j] + 128);
    }
}

static void idct_pair_c(const Block *a, const Block *b) {
    idct_block_c(a);
    idct_block_c(b);
}

/* ---- upsampling: the triangle filter -------------------------------------------------------- */

static void upsample_h2v1_c(const uint8_t *near, uint8_t *out, int n) {
    for (int i = 0; i < n; i++) {
        out[2 * i] = (uint8_t)((3 * near[i] + near[i - 1] + 1) >> 2);
        out[2 * i + 1] = (uint8_t)((3 * near[i] + near[i + 1] + 2) >> 2);
    }
}

static void upsample_h2v2_c(const uint8_t *near, const uint8_t *far, uint8_t *out, int n) {
    int previous = 3 * near[-1] + far[-1];
    int here = 3 * near[0] + far[0];
    for (int i = 0; i < n; i++) {
        int next = 3 * near[i + 1] + far[i + 1];
        out[2 * i] = (uint8_t)((3 * here + previous + 8) >> 4);
        out[2 * i + 1] = (uint8_t)((3 * here + next + 7) >> 4);
        previous = here;
        here = next;
    }
}

static void upsample_h1v2_c(const uint8_t *near, const uint8_t *far, uint8_t *out, int n,
                            int bias) {
    for (int i = 0; i < n; i++) out[i] = (uint8_t)((3 * near[i] + far[i] + bias) >> 2);
}

/* ---- colors --------------------------------------------------------------------------------- */

/* JFIF's factors in 16-bit fixed point. With C' = C - 128:
 * R = Y + 1.402 Cr', G = Y - 0.34414 Cb' - 0.71414 Cr', B = Y + 1.772 Cb'. */
enum {
    CR_TO_R = 91881,
    CB_TO_G = 22554,
    CR_TO_G = 46802,
    CB_TO_B = 116130,
    HALF = 1 << 15,
};

static void ycc_to_rgb_c(const uint8_t *y, const uint8_t *cb, const uint8_t *cr, uint8_t *rgb,
                         int n) {
    for (int i = 0; i < n; i++) {
        int b = cb[i] - 128;
        int r = cr[i] - 128;
        rgb[3 * i] = clamp8(y[i] + ((CR_TO_R * r + HALF) >> 16));
        rgb[3 * i + 1] = clamp8(y[i] + ((HALF - CB_TO_G * b - CR_TO_G * r) >> 16));
        rgb[3 * i + 2] = clamp8(y[i] + ((CB_TO_B * b + HALF) >> 16));
    }
}

/* Interleave three planes: R, G and B, or three times the same gray plane. */
static void interleave_c(const uint8_t *r, const uint8_t *g, const uint8_t *b, uint8_t *rgb,
                         int n) {
    for (int i = 0; i < n; i++) {
        rgb[3 * i] = r[i];
        rgb[3 * i + 1] = g[i];
        rgb[3 * i + 2] = b[i];
    }
}

static const Kernels KERNELS_C = {
    .idct_pair = idct_pair_c,
    .upsample_h2v1 = upsample_h2v1_c,
    .upsample_h2v2 = upsample_h2v2_c,
    .upsample_h1v2 = upsample_h1v2_c,
    .ycc_to_rgb = ycc_to_rgb_c,
    .copy_segment = jpeg_unstuff,
};

#endif
