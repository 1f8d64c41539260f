/* Plan the decoding of a window: needed blocks of each component, MCUs, segments, and memory.
 *
 * `plan_window` converts the window's pixels to samples. Interpolated chroma needs one more sample
 * around the window. Samples are then converted to blocks, blocks to a rectangle of MCUs, and MCUs
 * to the restart segments that contain them. `needed_until` returns where decoding a segment can
 * stop.
 */
#ifndef VIT_WINDOW_PLAN_H
#define VIT_WINDOW_PLAN_H

#include <stdlib.h>

#include "blocks.h"
#include "pixels.h"

#define MAX_PIXELS 178956970 /* as in vit/data/decode/jpeg_header.py */

/* The part of a component that the window needs. */
typedef struct {
    uint32_t left, top, wide, high; /* blocks that become samples; 0 wide: not needed */
    uint32_t width, height;         /* samples of the entire component */
    uint32_t stretch_x, stretch_y;  /* pixels per sample */
    uint8_t *samples;               /* of the upper left block; ROW_PAD bytes before each row */
    ptrdiff_t stride;               /* bytes from one row of samples to the next */
    int16_t quantisation[64];       /* natural order */
} Plane;

/* The position of a block in its MCU, in blocks of its component. */
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
    uint32_t x, y, width, height; /* of the window, in pixels */
    Plane planes[3];
    McuBlock blocks[JPEG_MAX_MCU_BLOCKS];
    int num_blocks;                      /* in an MCU */
    uint32_t left, top, right, bottom;   /* MCUs that contain needed blocks */
    uint32_t interval;                   /* MCUs in a segment */
    uint32_t first_segment, end_segment; /* that may be needed */
    Segment *segments;                   /* first_segment to end_segment - 1 */
    uint8_t *bytes;                      /* image data, unstuffed */
    uint8_t *lines[2];                   /* a row of upsampled Cb, and of Cr */
    DecodeTable dc[4], ac[4];
} Window;

INLINE uint32_t at_most(uint32_t a, uint32_t b) { return a < b ? a : b; }

/* Return the blocks that contain the samples for the pixels first to last, along one axis.
 *
 * margin: samples around them that interpolation reads; size: samples in the component.
 */
static void plan_blocks(uint32_t first, uint32_t last, uint32_t stretch, uint32_t size,
                        uint32_t *start, uint32_t *count) {
    uint32_t margin = stretch == 2;
    uint32_t low = first / stretch;
    uint32_t high = at_most(last / stretch + margin, size - 1);
    *start = (low > margin ? low - margin : 0) / 8;
    *count = high / 8 + 1 - *start;
}

/* Fill a component's plane, and extend the window's rectangle of MCUs to contain it. */
static void plan_plane(Window *w, int c) {
    const Jpeg *jpeg = &w->jpeg;
    const JpegComponent *component = jpeg->components + c;
    Plane *plane = w->planes + c;
    uint32_t last_x = w->x + w->width - 1;
    uint32_t last_y = w->y + w->height - 1;
    plane->stretch_x = (uint32_t)jpeg->h_max / component->h;
    plane->stretch_y = (uint32_t)jpeg->v_max / component->v;
    plane->width = jpeg_ceil_div(jpeg->width * component->h, (uint32_t)jpeg->h_max);
    plane->height = jpeg_ceil_div(jpeg->height * component->v, (uint32_t)jpeg->v_max);
    plan_blocks(w->x, last_x, plane->stretch_x, plane->width, &plane->left, &plane->wide);
    plan_blocks(w->y, last_y, plane->stretch_y, plane->height, &plane->top, &plane->high);
    plane->stride = (ptrdiff_t)plane->wide * 8 + ROW_PAD;
    w->left = at_most(w->left, plane->left / component->h);
    w->top = at_most(w->top, plane->top / component->v);
    uint32_t right = jpeg_ceil_div(plane->left + plane->wide, component->h);
    uint32_t bottom = jpeg_ceil_div(plane->top + plane->high, component->v);
    if (right > w->right) w->right = right;
    if (bottom > w->bottom) w->bottom = bottom;
    for (int k = 0; k < 64; k++) {
        plane->quantisation[NATURAL_ORDER[k]] = (int16_t)jpeg->quant[component->quant][k];
    }
}

/* Fill the fields that depend on the headers and on the window's position and size. */
static Status plan_window(Window *w, int channels) {
    const Jpeg *jpeg = &w->jpeg;
    if (!w->width || !w->height) return WINDOW_OUTSIDE;
    if (w->x > jpeg->width || w->y > jpeg->height) return WINDOW_OUTSIDE;
    if (w->width > jpeg->width - w->x || w->height > jpeg->height - w->y) return WINDOW_OUTSIDE;
    if (channels == 1 && jpeg->is_rgb) return WINDOW_COLORS;
    w->left = UINT32_MAX;
    w->top = UINT32_MAX;
    for (int c = 0; c < jpeg->num_components; c++) {
        const JpegComponent *component = jpeg->components + c;
        if (jpeg->h_max % component->h || jpeg->v_max % component->v) return WINDOW_SAMPLING;
        /* The first component is never upsampled, because only chroma has `lines`. */
        int is_full = component->h == jpeg->h_max && component->v == jpeg->v_max;
        if (c == 0 && !is_full) return WINDOW_SAMPLING;
        for (uint32_t k = 0; k < (uint32_t)component->h * component->v; k++) {
            w->blocks[w->num_blocks++] = (McuBlock){c, k % component->h, k / component->h};
        }
        if (c == 0 || channels == 3) plan_plane(w, c);
    }
    uint32_t num_mcus = jpeg->mcus_wide * jpeg->mcus_high;
    w->interval = jpeg->restart_interval ? jpeg->restart_interval : num_mcus;
    w->first_segment = (w->top * jpeg->mcus_wide + w->left) / w->interval;
    uint32_t last_mcu = (w->bottom - 1) * jpeg->mcus_wide + w->right - 1;
    w->end_segment = last_mcu / w->interval + 1;
    return JPEG_OK;
}

/* Return the MCU after the last needed one before `end`, or 0 if none is needed. */
static uint32_t needed_until(const Window *w, uint32_t end) {
    uint32_t wide = w->jpeg.mcus_wide;
    uint32_t row = (end - 1) / wide;
    uint32_t column = (end - 1) % wide;
    if (row >= w->bottom) return (w->bottom - 1) * wide + w->right;
    if (column < w->left) {
        row--; /* may wrap below row 0: then row + 1 is 0, above every window */
        column = w->right;
    }
    if (row + 1 <= w->top) return 0;
    return row * wide + (column < w->right ? column + 1 : w->right);
}

/* Return the MCU after the last one of a segment. */
static uint32_t segment_end(const Window *w, uint32_t segment) {
    uint64_t end = ((uint64_t)segment + 1) * w->interval;
    uint64_t num_mcus = (uint64_t)w->jpeg.mcus_wide * w->jpeg.mcus_high;
    return (uint32_t)(end < num_mcus ? end : num_mcus);
}

/* Return the number of bytes for the samples of a component.
 *
 * Two additional rows, of at least 40 bytes each, provide ROW_PAD before the first row and after
 * the last one.
 */
INLINE size_t plane_bytes(const Plane *plane) {
    return (size_t)plane->stride * (plane->high * 8 + 2);
}

/* Allocate one piece of memory for all data whose size depends on the window or the file.
 *
 * Returns the memory, which the caller must free, or NULL.
 */
static uint8_t *allocate(Window *w) {
    size_t count = w->end_segment - w->first_segment;
    size_t scan_bytes = w->jpeg.size - w->jpeg.scan_offset; /* unstuffed data are not longer */
    size_t bytes = scan_bytes + count * JPEG_PADDING + COPY_SLACK;
    size_t line = w->width + 4 * ROW_PAD; /* kernels read and write up to 32 bytes beyond the end */
    size_t total = count * sizeof(Segment) + 2 * line + 2 * ROW_PAD + bytes;
    for (int c = 0; c < 3; c++) total += plane_bytes(w->planes + c);
    uint8_t *memory = malloc(total);
    if (!memory) return NULL;
    uint8_t *next = memory;
    w->segments = (Segment *)next;
    next += count * sizeof(Segment);
    for (int c = 0; c < 3; c++) {
        w->planes[c].samples = next + ROW_PAD;
        next += plane_bytes(w->planes + c);
    }
    for (int c = 0; c < 2; c++) {
        w->lines[c] = next;
        next += line;
    }
    w->bytes = next;
    return memory;
}

#endif
