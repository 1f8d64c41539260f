/* The pixels of a window of a JPEG, at the cost of the window.
 *
 * The data's story: the headers and the window say which blocks of which component are needed (`plan_window`: chroma needs a sample around
 * the window, as it is interpolated). The image data are copied without their stuffed bytes, segment by segment (`copy_segments`). From each
 * needed segment the codes are read up to the last needed one; blocks that are needed become samples, of the others only the DC coefficient
 * is followed (`decode_cells`). At last each row of the window is put together (`make_pixels`). Without restart markers there is one
 * segment, read from its start to the window's last row. With a marker at a divisor of a row of MCUs the codes left and right of the window,
 * above and below, are not read, and those of two rows are read at once.
 *
 * The pixels are those of libjpeg-turbo with its default settings, or a status. Damage in what is read is a status, also where libjpeg
 * would only warn; what is not read may be damaged. Nothing outside of the caller's buffers is touched, whatever the bytes are.
 */
#include <stdlib.h>

#include "blocks.h"
#include "pixels.h"

/* JpegStatus goes on; Status in vit/data/decode/native.py. */
enum { WINDOW_OUTSIDE = 8, WINDOW_SAMPLING = 9, WINDOW_COLOURS = 10, WINDOW_IMAGE = 11 };

/* What the window needs of a component. */
typedef struct {
    uint32_t left, top, wide, high; /* blocks that become samples; 0 wide: the component is not needed */
    uint32_t width, height;         /* samples of the whole component */
    uint32_t stretch_x, stretch_y;  /* pixels for each sample */
    uint8_t *samples;               /* of the upper left block, with ROW_PAD bytes before each row */
    ptrdiff_t stride;
    int16_t quantisation[64]; /* natural order */
} Plane;

/* A block's place in the MCU, in blocks of its component. */
typedef struct {
    int component;
    uint32_t x, y;
} McuBlock;

typedef struct {
    const uint8_t *bytes; /* unstuffed; NULL if not needed */
    size_t size;
} Segment;

typedef struct {
    Jpeg jpeg;
    uint32_t x, y, width, height; /* of the window, pixels */
    Plane planes[3];
    McuBlock blocks[JPEG_MAX_MCU_BLOCKS];
    int num_blocks;                   /* in an MCU */
    uint32_t left, top, right, bottom; /* MCUs that hold needed blocks */
    uint32_t interval;                /* MCUs in a segment */
    uint32_t first_segment, end_segment; /* that can be needed */
    Segment *segments;                /* first_segment to end_segment - 1 */
    uint8_t *bytes, *lines[2];        /* image data, unstuffed; two rows of stretched chroma */
    Codes dc[4], ac[4];
} Window;

/* ---- plan --------------------------------------------------------------------------------------------------------- */

#define MAX_PIXELS 178956970 /* as in vit/data/decode/jpeg_header.py */

INLINE uint32_t at_most(uint32_t a, uint32_t b) { return a < b ? a : b; }

/* Blocks that hold samples for the pixels first to last, with `margin` samples around, of `size` samples in all. */
static void plan_blocks(uint32_t first, uint32_t last, uint32_t stretch, uint32_t margin, uint32_t size, uint32_t *start, uint32_t *count) {
    uint32_t low = first / stretch, high = at_most(last / stretch + margin, size - 1);
    *start = (low > margin ? low - margin : 0) / 8;
    *count = high / 8 + 1 - *start;
}

static int plan_window(Window *w, int channels) {
    const Jpeg *jpeg = &w->jpeg;
    if (!w->width || !w->height || w->x > jpeg->width || w->y > jpeg->height) return WINDOW_OUTSIDE;
    if (w->width > jpeg->width - w->x || w->height > jpeg->height - w->y) return WINDOW_OUTSIDE;
    if (channels == 1 && jpeg->is_rgb) return WINDOW_COLOURS;
    w->left = w->top = UINT32_MAX;
    for (int c = 0; c < jpeg->num_components; c++) {
        const JpegComponent *component = jpeg->components + c;
        Plane *plane = w->planes + c;
        if (jpeg->h_max % component->h || jpeg->v_max % component->v) return WINDOW_SAMPLING;
        if (!c && (component->h != jpeg->h_max || component->v != jpeg->v_max)) return WINDOW_SAMPLING; /* `lines` are for chroma */
        for (uint32_t k = 0; k < (uint32_t)component->h * component->v; k++)
            w->blocks[w->num_blocks++] = (McuBlock){c, k % component->h, k / component->h};
        if (c && channels == 1) continue;
        plane->stretch_x = (uint32_t)jpeg->h_max / component->h, plane->stretch_y = (uint32_t)jpeg->v_max / component->v;
        plane->width = jpeg_ceil_div(jpeg->width * component->h, (uint32_t)jpeg->h_max);
        plane->height = jpeg_ceil_div(jpeg->height * component->v, (uint32_t)jpeg->v_max);
        plan_blocks(w->x, w->x + w->width - 1, plane->stretch_x, plane->stretch_x == 2, plane->width, &plane->left, &plane->wide);
        plan_blocks(w->y, w->y + w->height - 1, plane->stretch_y, plane->stretch_y == 2, plane->height, &plane->top, &plane->high);
        plane->stride = (ptrdiff_t)plane->wide * 8 + ROW_PAD;
        w->left = at_most(w->left, plane->left / component->h), w->top = at_most(w->top, plane->top / component->v);
        uint32_t right = jpeg_ceil_div(plane->left + plane->wide, component->h);
        uint32_t bottom = jpeg_ceil_div(plane->top + plane->high, component->v);
        w->right = right > w->right ? right : w->right, w->bottom = bottom > w->bottom ? bottom : w->bottom;
        for (int k = 0; k < 64; k++) plane->quantisation[PLACES[k]] = (int16_t)jpeg->quant[component->quant][k];
    }
    w->interval = jpeg->restart_interval ? jpeg->restart_interval : jpeg->mcus_wide * jpeg->mcus_high;
    w->first_segment = (w->top * jpeg->mcus_wide + w->left) / w->interval;
    w->end_segment = ((w->bottom - 1) * jpeg->mcus_wide + w->right - 1) / w->interval + 1;
    return JPEG_OK;
}

/* The MCU behind the last needed one before `end`; 0 if there is none. */
static uint32_t needed_until(const Window *w, uint32_t end) {
    uint32_t wide = w->jpeg.mcus_wide, row = (end - 1) / wide, column = (end - 1) % wide;
    if (row >= w->bottom) return (w->bottom - 1) * wide + w->right;
    if (column < w->left) row--, column = w->right; /* may wrap below row 0, to a row that is above none */
    if (row + 1 <= w->top) return 0;
    return row * wide + (column < w->right ? column + 1 : w->right);
}

static uint32_t segment_end(const Window *w, uint32_t segment) {
    uint64_t end = ((uint64_t)segment + 1) * w->interval, all = (uint64_t)w->jpeg.mcus_wide * w->jpeg.mcus_high;
    return (uint32_t)(end < all ? end : all);
}

/* Bytes of a component's samples. Two rows more than there are, of 40 bytes at least, hold ROW_PAD before the first and behind the last one. */
INLINE size_t plane_room(const Plane *plane) { return (size_t)plane->stride * (plane->high * 8 + 2); }

/* Memory for all that depends on the window's and the file's size, in one piece; NULL if there is none. */
static uint8_t *allocate(Window *w) {
    size_t count = w->end_segment - w->first_segment;
    size_t bytes = w->jpeg.size - w->jpeg.scan_offset + count * JPEG_PADDING + COPY_SLACK; /* unstuffed data are not longer */
    size_t line = w->width + 4 * ROW_PAD; /* kernels make and read up to 32 bytes more than were asked for */
    size_t total = count * sizeof(Segment) + 2 * line + 2 * ROW_PAD + bytes;
    for (int c = 0; c < 3; c++) total += plane_room(w->planes + c);
    uint8_t *memory = malloc(total), *next = memory;
    if (!memory) return NULL;
    w->segments = (Segment *)next, next += count * sizeof(Segment);
    for (int c = 0; c < 3; c++) w->planes[c].samples = next + ROW_PAD, next += plane_room(w->planes + c);
    for (int c = 0; c < 2; c++) w->lines[c] = next, next += line;
    w->bytes = next;
    return memory;
}

/* ---- codes to samples ----------------------------------------------------------------------------------------------- */

INLINE void make_tables(Window *w) {
    uint32_t made = 0;
    for (int c = 0; c < w->jpeg.num_components; c++) {
        const JpegComponent *component = w->jpeg.components + c;
        if (!(made & 1u << component->dc)) make_codes(w->jpeg.dc + component->dc, 0, w->dc + component->dc);
        if (!(made & 16u << component->ac)) make_codes(w->jpeg.ac + component->ac, 1, w->ac + component->ac);
        made |= 1u << component->dc | 16u << component->ac;
    }
}

/* Copy the needed segments, without stuffed bytes. The markers are looked at to the end of the image, also behind the window: else whether a
 * file that is cut off is a good image would depend on the window, and on whether this library is there. */
INLINE int copy_segments(Window *w, const Kernels *kernels) {
    const Jpeg *jpeg = &w->jpeg;
    const uint8_t *from = jpeg->data + jpeg->scan_offset, *end = jpeg->data + jpeg->size;
    uint8_t *to = w->bytes;
    size_t num_segments = jpeg_num_segments(jpeg);
    for (size_t s = 0; s < num_segments; s++) {
        uint8_t *to_end = kernels->copy_segment(&from, end, to);
        if (!jpeg_pass_marker(&from, end, s + 1 < num_segments ? 0xD0 + (s & 7) : 0xD9)) return JPEG_DAMAGED; /* RSTn in turn, EOI, B.2.1 */
        if (s < w->first_segment || s >= w->end_segment) continue; /* the next one is copied over it */
        int needed = needed_until(w, segment_end(w, (uint32_t)s)) > s * w->interval;
        w->segments[s - w->first_segment] = (Segment){needed ? to : NULL, (size_t)(to_end - to)};
        if (!needed) continue;
        memset(to_end, 0, JPEG_PADDING);
        to = to_end + JPEG_PADDING;
    }
    return JPEG_OK;
}

typedef struct {
    JpegBits bits;
    int32_t dc[3];
} Stream;

typedef struct {
    int16_t coefficients[2][BLOCK_ROOM];
    Block blocks[2];
    int count;       /* blocks that wait for their transform */
    uint8_t aside[64]; /* samples that nobody needs */
} __attribute__((aligned(32))) Pair;

/* Transform both blocks and make room for the next ones. */
INLINE void flush_pair(Pair *pair, const Kernels *kernels) {
    typedef int64_t Zeros __attribute__((vector_size(32), may_alias));
    kernels->idct_pair(&pair->blocks[0], &pair->blocks[1]);
    for (int i = 0; i < BLOCK_ROOM / 8; i++) ((Zeros *)pair->coefficients)[i] = (Zeros){0}; /* memset becomes a slow `rep stos` */
    pair->count = 0;
}

INLINE int is_needed(const Plane *plane, uint32_t x, uint32_t y) {
    return x - plane->left < plane->wide && y - plane->top < plane->high; /* below 0 is far above */
}

/* The block at (x, y) of a component: where its samples go, which is aside if they are not needed. */
INLINE Block block_at(const Plane *plane, uint32_t x, uint32_t y, const int16_t *coefficients, uint8_t *aside) {
    if (!is_needed(plane, x, y)) return (Block){coefficients, plane->quantisation, aside, 8};
    uint8_t *samples = plane->samples + (ptrdiff_t)(y - plane->top) * 8 * plane->stride + (x - plane->left) * 8;
    return (Block){coefficients, plane->quantisation, samples, plane->stride};
}

/* The MCUs `column` to `stop` - 1 of row `row` from `a`; with `b` those of the row below from there. */
INLINE int decode_cells(Window *w, const Kernels *kernels, Pair *pair, Stream *a, Stream *b, uint32_t row, uint32_t column, uint32_t stop) {
    Stream first = *a, second = b ? *b : (Stream){0};
    int good = 1;
    for (; column < stop; column++) {
        for (int k = 0; k < w->num_blocks; k++) {
            const McuBlock *block = w->blocks + k;
            const JpegComponent *component = w->jpeg.components + block->component;
            const Plane *plane = w->planes + block->component;
            const Codes *dc = w->dc + component->dc, *ac = w->ac + component->ac;
            int32_t *dc_a = first.dc + block->component, *dc_b = second.dc + block->component;
            uint32_t x = column * component->h + block->x, y = row * component->v + block->y;
            int needed_a = is_needed(plane, x, y), needed_b = b && is_needed(plane, x, y + component->v);
            *dc_a = take_dc(&first.bits, dc, *dc_a, &good);
            if (b) *dc_b = take_dc(&second.bits, dc, *dc_b, &good);
            if (!needed_a && !needed_b) {
                good &= b ? take_ac_pair(&first.bits, &second.bits, ac, NULL, NULL) : take_ac(&first.bits, ac, 0, NULL);
            } else if (b) {
                int16_t *coefficients_a = pair->coefficients[0], *coefficients_b = pair->coefficients[1];
                good &= take_ac_pair(&first.bits, &second.bits, ac, coefficients_a, coefficients_b);
                coefficients_a[0] = (int16_t)*dc_a, coefficients_b[0] = (int16_t)*dc_b;
                pair->blocks[0] = block_at(plane, x, y, coefficients_a, pair->aside);
                pair->blocks[1] = block_at(plane, x, y + component->v, coefficients_b, pair->aside);
                flush_pair(pair, kernels);
            } else {
                int16_t *coefficients = pair->coefficients[pair->count];
                good &= take_ac(&first.bits, ac, 0, coefficients);
                coefficients[0] = (int16_t)*dc_a;
                pair->blocks[pair->count++] = block_at(plane, x, y, coefficients, pair->aside);
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

/* Where each row of MCUs has the same segments: those of two rows at once. */
INLINE int decode_row_pairs(Window *w, const Kernels *kernels, Pair *pair) {
    uint32_t row_segments = w->jpeg.mcus_wide / w->interval;
    for (uint32_t row = w->top; row < w->bottom; row += 2) {
        for (uint32_t s = w->left / w->interval; s * w->interval < w->right; s++) {
            uint32_t column = s * w->interval, end = column + w->interval, stop = at_most(end, w->right);
            Stream a = open_segment(w, row * row_segments + s), b;
            int status, two = row + 1 < w->bottom;
            if (two) {
                b = open_segment(w, (row + 1) * row_segments + s);
                status = decode_cells(w, kernels, pair, &a, &b, row, column, stop);
            } else {
                status = decode_cells(w, kernels, pair, &a, NULL, row, column, stop);
            }
            if (status != JPEG_OK) return status;
            if (stop == end && !(jpeg_bits_finished(&a.bits) && (!two || jpeg_bits_finished(&b.bits)))) return JPEG_DAMAGED;
        }
    }
    return JPEG_OK;
}

/* Segments of any length, or only one. */
INLINE int decode_one_by_one(Window *w, const Kernels *kernels, Pair *pair) {
    uint32_t wide = w->jpeg.mcus_wide;
    for (uint32_t s = w->first_segment; s < w->end_segment; s++) {
        uint32_t mcu = s * w->interval, end = segment_end(w, s), stop = needed_until(w, end);
        if (stop <= mcu) continue;
        Stream stream = open_segment(w, s);
        while (mcu < stop) {
            uint32_t column = mcu % wide, count = at_most(stop - mcu, wide - column);
            int status = decode_cells(w, kernels, pair, &stream, NULL, mcu / wide, column, column + count);
            if (status != JPEG_OK) return status;
            mcu += count;
        }
        if (stop == end && !jpeg_bits_finished(&stream.bits)) return JPEG_DAMAGED;
    }
    return JPEG_OK;
}

/* ---- samples to pixels ----------------------------------------------------------------------------------------------- */

/* Samples beyond the image's edges, where a stretch asks for them: those at the edge. */
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
    return plane->samples + (ptrdiff_t)(y - plane->top * 8) * plane->stride + (x - plane->left * 8);
}

/* `n` samples for the pixels from (x, y) on, in the plane itself or stretched into `line`. Which filter: `jinit_upsampler` of
 * jdsample.c. */
INLINE const uint8_t *sample_row(const Plane *plane, const Kernels *kernels, uint32_t x, uint32_t y, uint32_t n, uint8_t *line) {
    uint32_t sx = plane->stretch_x, sy = plane->stretch_y, first = x / sx, above_or_below = y / sy;
    const uint8_t *near = sample_at(plane, first, y / sy);
    if (sx == 1 && sy == 1) return near;
    if (sy == 2) above_or_below = y & 1 ? at_most(y / 2 + 1, plane->height - 1) : y / 2 - (y > 1);
    const uint8_t *far = sample_at(plane, first, above_or_below);
    if (sx == 1 && sy == 2) {
        kernels->blend(near, far, line, (int)n, y & 1 ? 2 : 1);
        return line;
    }
    if (sx == 2 && sy <= 2 && plane->width > 2) {
        uint32_t count = (x + n - 1) / 2 - first + 1;
        if (sy == 1) kernels->stretch(near, line, (int)count);
        else kernels->blend_stretch(near, far, line, (int)count);
        return line + (x & 1);
    }
    for (uint32_t i = 0; i < n; i++) line[i] = near[(x + i) / sx - first];
    return line;
}

INLINE void make_pixels(Window *w, const Kernels *kernels, int channels, uint8_t *pixels, ptrdiff_t row_bytes) {
    uint32_t n = w->width;
    for (int c = 0; c < w->jpeg.num_components; c++)
        if (w->planes[c].wide) extend_edges(w->planes + c);
    for (uint32_t y = w->y; y < w->y + w->height; y++, pixels += row_bytes) {
        const uint8_t *luma = sample_at(w->planes, w->x, y); /* never stretched: `plan_window` */
        if (channels == 1) {
            memcpy(pixels, luma, n);
            continue;
        }
        const uint8_t *second = luma, *third = luma;
        if (w->jpeg.num_components == 3) {
            second = sample_row(w->planes + 1, kernels, w->x, y, n, w->lines[0]);
            third = sample_row(w->planes + 2, kernels, w->x, y, n, w->lines[1]);
        }
        if (w->jpeg.num_components == 3 && !w->jpeg.is_rgb) kernels->ycc_to_rgb(luma, second, third, pixels, (int)n);
        else interleave_c(luma, second, third, pixels, (int)n);
    }
}

/* ---- all of it ----------------------------------------------------------------------------------------------------- */

INLINE int decode(Window *w, const Kernels *kernels, int channels, uint8_t *pixels, ptrdiff_t row_bytes) {
    Pair pair = {0};
    int status = copy_segments(w, kernels);
    if (status == JPEG_OK) {
        make_tables(w);
        int same_in_each_row = w->interval <= w->jpeg.mcus_wide && w->jpeg.mcus_wide % w->interval == 0 && w->jpeg.restart_interval;
        status = same_in_each_row ? decode_row_pairs(w, kernels, &pair) : decode_one_by_one(w, kernels, &pair);
    }
    if (status != JPEG_OK) return status;
    if (pair.count) {
        pair.blocks[1] = pair.blocks[0];
        flush_pair(&pair, kernels);
    }
    make_pixels(w, kernels, channels, pixels, row_bytes);
    return JPEG_OK;
}

static int decode_portable(Window *w, int channels, uint8_t *pixels, ptrdiff_t row_bytes) {
    return decode(w, &KERNELS_C, channels, pixels, row_bytes);
}

#if HAVE_AVX2_KERNELS
__attribute__((target("avx2,bmi,bmi2"))) static int decode_avx2(Window *w, int channels, uint8_t *pixels, ptrdiff_t row_bytes) {
    return decode(w, &KERNELS_AVX2, channels, pixels, row_bytes);
}
#endif

/* Decode the window into `pixels`: `height` rows of `width` times 1 (grey) or 3 (RGB) bytes, `row_bytes` apart. Returns JPEG_OK or why
 * not; then `pixels` hold anything. The image must have `image_width` and `image_height`; 0: any. `portable` leaves the processor's own
 * instructions aside. */
int vit_decode_window(const uint8_t *data, size_t size, uint32_t image_width, uint32_t image_height, uint32_t x, uint32_t y,
                      uint32_t width, uint32_t height, int channels, uint8_t *pixels, ptrdiff_t row_bytes, int portable) {
    Window *w = malloc(sizeof *w);
    uint8_t *memory = NULL;
    if (!w) return JPEG_MEMORY;
    w->x = x, w->y = y, w->width = width, w->height = height;
    w->num_blocks = 0, w->right = w->bottom = 0;
    memset(w->planes, 0, sizeof w->planes);
    int status = jpeg_parse(data, size, &w->jpeg);
    if (status == JPEG_OK && image_width && (w->jpeg.width != image_width || w->jpeg.height != image_height)) status = WINDOW_IMAGE;
    if (status == JPEG_OK && (uint64_t)w->jpeg.width * w->jpeg.height > MAX_PIXELS) status = WINDOW_IMAGE;
    if (status == JPEG_OK) status = plan_window(w, channels);
    if (status == JPEG_OK && w->end_segment > size / 2) status = JPEG_DAMAGED; /* before memory is asked for: headers lie */
    if (status == JPEG_OK && !(memory = allocate(w))) status = JPEG_MEMORY;
    if (status == JPEG_OK) {
#if HAVE_AVX2_KERNELS
        if (!portable && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2"))
            status = decode_avx2(w, channels, pixels, row_bytes);
        else
#endif
            status = decode_portable(w, channels, pixels, row_bytes);
    }
    (void)portable;
    free(memory);
    free(w);
    return status;
}

/* ---- which library this is: asked by vit/data/decode/native.py before anything else -------------------------------------------- */

/* ABI there. One more whenever a function of this library takes or returns something else. */
int vit_native_abi(void) { return 1; }

#ifndef VIT_NATIVE_SOURCES /* a hash of the C files, by setup.py */
#define VIT_NATIVE_SOURCES "unknown"
#endif
const char *vit_native_sources(void) { return VIT_NATIVE_SOURCES; }
