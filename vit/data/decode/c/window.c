/* Decode a window of a JPEG, at a cost in proportion to the window.
 *
 * 1. The headers and the window determine the needed blocks of each component (`plan_window`,
 *    window_plan.h).
 * 2. The needed segments are copied without their stuffed bytes (`copy_segments`).
 * 3. Each needed segment is decoded up to its last needed block. Needed blocks become samples; of
 *    other blocks, only the DC coefficient is tracked (`decode_mcus`).
 * 4. Each row of the window is assembled from samples (`make_pixels`).
 *
 * Without restart markers, there is one segment, which is read from its start to the last row of
 * the window. If the marker interval divides a row of MCUs, segments beside, above and below the
 * window are not decoded, and the segments of two rows are decoded alternately.
 *
 * The pixels equal those of libjpeg-turbo with its default settings; otherwise a status is
 * returned. Damage in decoded data results in a status, even if libjpeg would only warn. Damage
 * elsewhere may go unnoticed. Nothing outside the caller's buffers is accessed, for any input.
 */
#include "pixels_avx2.h"
#include "window_plan.h"

/* ---- codes to samples ----------------------------------------------------------------------- */

/* Build the lookup tables that the components use. */
INLINE void make_tables(Window *w) {
    uint32_t made = 0;
    for (int c = 0; c < w->jpeg.num_components; c++) {
        const JpegComponent *component = w->jpeg.components + c;
        uint32_t dc_bit = 1u << component->dc;
        uint32_t ac_bit = 16u << component->ac;
        if (!(made & dc_bit)) {
            make_decode_table(w->jpeg.dc + component->dc, 0, w->dc + component->dc);
        }
        if (!(made & ac_bit)) {
            make_decode_table(w->jpeg.ac + component->ac, 1, w->ac + component->ac);
        }
        made |= dc_bit | ac_bit;
    }
}

/* Copy the needed segments without stuffed bytes.
 *
 * All markers up to the end of the image are checked. Otherwise the validity of a truncated file
 * would depend on the window, and on the availability of this library.
 */
INLINE Status copy_segments(Window *w, const Kernels *kernels) {
    const Jpeg *jpeg = &w->jpeg;
    const uint8_t *from = jpeg->data + jpeg->scan_offset;
    const uint8_t *end = jpeg->data + jpeg->size;
    uint8_t *to = w->bytes;
    size_t num_segments = jpeg_num_segments(jpeg);
    for (size_t s = 0; s < num_segments; s++) {
        uint8_t *to_end = kernels->copy_segment(&from, end, to);
        int marker = s + 1 < num_segments ? 0xD0 + (s & 7) : 0xD9; /* next RSTn, or EOI: B.2.1 */
        if (!jpeg_pass_marker(&from, end, marker)) return JPEG_DAMAGED;
        if (s < w->first_segment || s >= w->end_segment) continue; /* the next one overwrites it */
        int needed = needed_until(w, segment_end(w, (uint32_t)s)) > s * w->interval;
        w->segments[s - w->first_segment] = (Segment){needed ? to : NULL, (size_t)(to_end - to)};
        if (!needed) continue;
        memset(to_end, 0, JPEG_PADDING);
        to = to_end + JPEG_PADDING;
    }
    return JPEG_OK;
}

/* The position in a segment: its bits, and the last DC coefficient of each component. */
typedef struct {
    JpegBits bits;
    int32_t dc[3];
} Stream;

/* Up to two blocks that wait for their transform. */
typedef struct {
    int16_t coefficients[2][BLOCK_ROOM];
    Block blocks[2];
    int count;           /* of waiting blocks */
    uint8_t discard[64]; /* samples that are not needed */
} __attribute__((aligned(32))) BlockPair;

/* Transform both blocks and clear their coefficients. */
INLINE void flush_pair(BlockPair *pair, const Kernels *kernels) {
    typedef int64_t Zeros __attribute__((vector_size(32), may_alias));
    kernels->idct_pair(&pair->blocks[0], &pair->blocks[1]);
    Zeros *coefficients = (Zeros *)pair->coefficients;
    /* A loop, because GCC would compile memset to a slow `rep stos`. */
    for (int i = 0; i < BLOCK_ROOM / 8; i++) coefficients[i] = (Zeros){0};
    pair->count = 0;
}

INLINE int is_needed(const Plane *plane, uint32_t x, uint32_t y) {
    return x - plane->left < plane->wide && y - plane->top < plane->high; /* wraps below 0 */
}

/* Return the block at (x, y) of a component. Its samples are discarded if they are not needed. */
INLINE Block block_at(const Plane *plane, uint32_t x, uint32_t y, const int16_t *coefficients,
                      uint8_t *discard) {
    if (!is_needed(plane, x, y)) return (Block){coefficients, plane->quantisation, discard, 8};
    ptrdiff_t row = (ptrdiff_t)(y - plane->top) * 8;
    uint8_t *samples = plane->samples + row * plane->stride + (x - plane->left) * 8;
    return (Block){coefficients, plane->quantisation, samples, plane->stride};
}

/* Decode the MCUs `column` to `stop` - 1 of row `row` from `a`, and those of the next row from `b`.
 *
 * b: NULL to decode only one row.
 */
INLINE Status decode_mcus(Window *w, const Kernels *kernels, BlockPair *pair, Stream *a, Stream *b,
                          uint32_t row, uint32_t column, uint32_t stop) {
    Stream first = *a;
    Stream second = b ? *b : (Stream){0};
    int good = 1;
    for (; column < stop; column++) {
        for (int k = 0; k < w->num_blocks; k++) {
            const McuBlock *block = w->blocks + k;
            const JpegComponent *component = w->jpeg.components + block->component;
            const Plane *plane = w->planes + block->component;
            const DecodeTable *dc = w->dc + component->dc;
            const DecodeTable *ac = w->ac + component->ac;
            int32_t *dc_a = first.dc + block->component;
            int32_t *dc_b = second.dc + block->component;
            uint32_t x = column * component->h + block->x;
            uint32_t y = row * component->v + block->y;
            int needed_a = is_needed(plane, x, y);
            int needed_b = b && is_needed(plane, x, y + component->v);
            *dc_a = take_dc(&first.bits, dc, *dc_a, &good);
            if (b) *dc_b = take_dc(&second.bits, dc, *dc_b, &good);
            if (!needed_a && !needed_b) {
                if (b) {
                    good &= take_ac_pair(&first.bits, &second.bits, ac, NULL, NULL);
                } else {
                    good &= take_ac(&first.bits, ac, 0, NULL);
                }
            } else if (b) {
                int16_t *coefficients_a = pair->coefficients[0];
                int16_t *coefficients_b = pair->coefficients[1];
                good &= take_ac_pair(&first.bits, &second.bits, ac, coefficients_a, coefficients_b);
                coefficients_a[0] = (int16_t)*dc_a;
                coefficients_b[0] = (int16_t)*dc_b;
                pair->blocks[0] = block_at(plane, x, y, coefficients_a, pair->discard);
                pair->blocks[1] =
                    block_at(plane, x, y + component->v, coefficients_b, pair->discard);
                flush_pair(pair, kernels);
            } else {
                int16_t *coefficients = pair->coefficients[pair->count];
                good &= take_ac(&first.bits, ac, 0, coefficients);
                coefficients[0] = (int16_t)*dc_a;
                pair->blocks[pair->count++] = block_at(plane, x, y, coefficients, pair->discard);
                if (pair->count == 2) flush_pair(pair, kernels);
            }
            good &= !jpeg_bits_overrun(&first.bits) && (!b || !jpeg_bits_overrun(&second.bits));
            if (!good) return JPEG_DAMAGED;
        }
    }
    *a = first;
    if (b) *b = second;
    return JPEG_OK;
}

INLINE Stream open_segment(const Window *w, uint32_t segment) {
    const Segment *s = w->segments + (segment - w->first_segment);
    return (Stream){jpeg_bits(s->bytes, s->size), {0, 0, 0}};
}

/* Decode two rows of MCUs at a time, if each row is cut into the same segments. */
INLINE Status decode_row_pairs(Window *w, const Kernels *kernels, BlockPair *pair) {
    uint32_t row_segments = w->jpeg.mcus_wide / w->interval;
    for (uint32_t row = w->top; row < w->bottom; row += 2) {
        for (uint32_t s = w->left / w->interval; s * w->interval < w->right; s++) {
            uint32_t column = s * w->interval;
            uint32_t end = column + w->interval;
            uint32_t stop = at_most(end, w->right);
            int has_second = row + 1 < w->bottom;
            Stream a = open_segment(w, row * row_segments + s);
            Stream b;
            Status status;
            if (has_second) {
                b = open_segment(w, (row + 1) * row_segments + s);
                status = decode_mcus(w, kernels, pair, &a, &b, row, column, stop);
            } else {
                status = decode_mcus(w, kernels, pair, &a, NULL, row, column, stop);
            }
            if (status != JPEG_OK) return status;
            if (stop < end) continue;
            if (!jpeg_bits_finished(&a.bits)) return JPEG_DAMAGED;
            if (has_second && !jpeg_bits_finished(&b.bits)) return JPEG_DAMAGED;
        }
    }
    return JPEG_OK;
}

/* Decode segments of any length, one after another. */
INLINE Status decode_segments(Window *w, const Kernels *kernels, BlockPair *pair) {
    uint32_t wide = w->jpeg.mcus_wide;
    for (uint32_t s = w->first_segment; s < w->end_segment; s++) {
        uint32_t mcu = s * w->interval;
        uint32_t end = segment_end(w, s);
        uint32_t stop = needed_until(w, end);
        if (stop <= mcu) continue;
        Stream stream = open_segment(w, s);
        while (mcu < stop) {
            uint32_t row = mcu / wide;
            uint32_t column = mcu % wide;
            uint32_t count = at_most(stop - mcu, wide - column);
            Status status =
                decode_mcus(w, kernels, pair, &stream, NULL, row, column, column + count);
            if (status != JPEG_OK) return status;
            mcu += count;
        }
        if (stop == end && !jpeg_bits_finished(&stream.bits)) return JPEG_DAMAGED;
    }
    return JPEG_OK;
}

/* ---- samples to pixels ---------------------------------------------------------------------- */

/* Repeat the samples at the image's left and right edge, because upsampling reads beyond it. */
static void extend_edges(const Plane *plane) {
    if (plane->stretch_x != 2) return;
    ptrdiff_t end = (ptrdiff_t)plane->width - (ptrdiff_t)plane->left * 8;
    for (uint32_t y = 0; y < plane->high * 8; y++) {
        uint8_t *row = plane->samples + (ptrdiff_t)y * plane->stride;
        if (plane->left == 0) row[-1] = row[0];
        if (end <= (ptrdiff_t)plane->wide * 8) row[end] = row[end - 1];
    }
}

INLINE const uint8_t *sample_at(const Plane *plane, uint32_t x, uint32_t y) {
    ptrdiff_t row = (ptrdiff_t)(y - plane->top * 8);
    return plane->samples + row * plane->stride + (x - plane->left * 8);
}

/* Return `n` samples for the pixels from (x, y) on: in the plane itself, or upsampled into `line`.
 *
 * The filter is selected as in `jinit_upsampler` of jdsample.c.
 */
INLINE const uint8_t *sample_row(const Plane *plane, const Kernels *kernels, uint32_t x, uint32_t y,
                                 uint32_t n, uint8_t *line) {
    uint32_t sx = plane->stretch_x;
    uint32_t sy = plane->stretch_y;
    uint32_t first = x / sx;
    const uint8_t *near = sample_at(plane, first, y / sy);
    if (sx == 1 && sy == 1) return near;
    uint32_t far_y = y / sy;
    if (sy == 2) far_y = y & 1 ? at_most(y / 2 + 1, plane->height - 1) : y / 2 - (y > 1);
    const uint8_t *far = sample_at(plane, first, far_y);
    if (sx == 1 && sy == 2) {
        kernels->upsample_h1v2(near, far, line, (int)n, y & 1 ? 2 : 1);
        return line;
    }
    if (sx == 2 && sy <= 2 && plane->width > 2) {
        int count = (int)((x + n - 1) / 2 - first + 1);
        if (sy == 1) {
            kernels->upsample_h2v1(near, line, count);
        } else {
            kernels->upsample_h2v2(near, far, line, count);
        }
        return line + (x & 1);
    }
    for (uint32_t i = 0; i < n; i++) line[i] = near[(x + i) / sx - first];
    return line;
}

/* Write all rows of the window. */
INLINE void make_pixels(Window *w, const Kernels *kernels, int channels, uint8_t *pixels,
                        ptrdiff_t row_bytes) {
    uint32_t n = w->width;
    int has_color = w->jpeg.num_components == 3;
    for (int c = 0; c < w->jpeg.num_components; c++) {
        if (w->planes[c].wide) extend_edges(w->planes + c);
    }
    for (uint32_t y = w->y; y < w->y + w->height; y++, pixels += row_bytes) {
        const uint8_t *luma = sample_at(w->planes, w->x, y); /* never upsampled: `plan_window` */
        if (channels == 1) {
            memcpy(pixels, luma, n);
            continue;
        }
        const uint8_t *second = luma;
        const uint8_t *third = luma;
        if (has_color) {
            second = sample_row(w->planes + 1, kernels, w->x, y, n, w->lines[0]);
            third = sample_row(w->planes + 2, kernels, w->x, y, n, w->lines[1]);
        }
        if (has_color && !w->jpeg.is_rgb) {
            kernels->ycc_to_rgb(luma, second, third, pixels, (int)n);
        } else {
            interleave_c(luma, second, third, pixels, (int)n);
        }
    }
}

/* ---- the window ----------------------------------------------------------------------------- */

/* Decode a planned window. Compiled once for each implementation of the kernels. */
INLINE Status decode(Window *w, const Kernels *kernels, int channels, uint8_t *pixels,
                     ptrdiff_t row_bytes) {
    BlockPair pair = {0};
    uint32_t wide = w->jpeg.mcus_wide;
    Status status = copy_segments(w, kernels);
    if (status == JPEG_OK) {
        make_tables(w);
        int same_in_each_row =
            w->jpeg.restart_interval && w->interval <= wide && wide % w->interval == 0;
        if (same_in_each_row) {
            status = decode_row_pairs(w, kernels, &pair);
        } else {
            status = decode_segments(w, kernels, &pair);
        }
    }
    if (status != JPEG_OK) return status;
    if (pair.count) { /* one block is left: transform it twice */
        pair.blocks[1] = pair.blocks[0];
        flush_pair(&pair, kernels);
    }
    make_pixels(w, kernels, channels, pixels, row_bytes);
    return JPEG_OK;
}

static Status decode_portable(Window *w, int channels, uint8_t *pixels, ptrdiff_t row_bytes) {
    return decode(w, &KERNELS_C, channels, pixels, row_bytes);
}

#if HAVE_AVX2_KERNELS
__attribute__((target("avx2,bmi,bmi2"))) static Status
decode_avx2(Window *w, int channels, uint8_t *pixels, ptrdiff_t row_bytes) {
    return decode(w, &KERNELS_AVX2, channels, pixels, row_bytes);
}
#endif

/* Check that the headers describe the expected image, and plan its window. */
static Status open_window(Window *w, const uint8_t *data, size_t size, uint32_t image_width,
                          uint32_t image_height, int channels) {
    Status status = jpeg_parse(data, size, &w->jpeg);
    if (status != JPEG_OK) return status;
    if (image_width && (w->jpeg.width != image_width || w->jpeg.height != image_height)) {
        return WINDOW_IMAGE;
    }
    if ((uint64_t)w->jpeg.width * w->jpeg.height > MAX_PIXELS) return WINDOW_IMAGE;
    status = plan_window(w, channels);
    if (status != JPEG_OK) return status;
    /* Headers may claim any number of segments, so check it before allocating memory for them. */
    return w->end_segment > size / 2 ? JPEG_DAMAGED : JPEG_OK;
}

/* Decode the window at (x, y) of a JPEG into `pixels`; return a Status.
 *
 * pixels: `height` rows of `width` times 1 (gray) or 3 (RGB) bytes, `row_bytes` apart; undefined
 *     after any status but JPEG_OK.
 * image_width, image_height: the size that the image must have; 0: any.
 * portable: do not use instructions that only some processors support.
 */
int vit_decode_window(const uint8_t *data, size_t size, uint32_t image_width, uint32_t image_height,
                      uint32_t x, uint32_t y, uint32_t width, uint32_t height, int channels,
                      uint8_t *pixels, ptrdiff_t row_bytes, int portable) {
    Window *w = malloc(sizeof *w);
    if (!w) return JPEG_MEMORY;
    w->x = x;
    w->y = y;
    w->width = width;
    w->height = height;
    w->num_blocks = 0;
    w->right = 0;
    w->bottom = 0;
    memset(w->planes, 0, sizeof w->planes);
    uint8_t *memory = NULL;
    Status status = open_window(w, data, size, image_width, image_height, channels);
    if (status == JPEG_OK) {
        memory = allocate(w);
        if (!memory) status = JPEG_MEMORY;
    }
    if (status == JPEG_OK) {
#if HAVE_AVX2_KERNELS
        if (!portable && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")) {
            status = decode_avx2(w, channels, pixels, row_bytes);
        } else
#endif
        {
            status = decode_portable(w, channels, pixels, row_bytes);
        }
    }
    (void)portable; /* unused without AVX2 kernels */
    free(memory);
    free(w);
    return status;
}

/* ---- the version of this library: vit/data/decode/native.py checks it before any other call -- */

/* Return the version of the interface, `ABI` in native.py. Increase both if the arguments or
 * results of any function in this library change. */
int vit_native_abi(void) { return 1; }

#ifndef VIT_NATIVE_SOURCES /* a hash of the C files, defined by setup.py */
#define VIT_NATIVE_SOURCES "unknown"
#endif

const char *vit_native_sources(void) { return VIT_NATIVE_SOURCES; }
