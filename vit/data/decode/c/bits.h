/* The image data of a JPEG: restart segments, and the bits in them.
 *
 * Restart markers divide the image data into segments. Without markers there is one segment.
 * `jpeg_unstuff` copies a segment without its stuffed zero bytes, and `jpeg_pass_marker` checks the
 * marker after it. `JpegBits` reads the copy, which is followed by JPEG_PADDING zero bytes. The
 * meaning of the bits is defined in blocks.h.
 *
 * Requires the byte order macros and `__builtin_bswap64` of GCC and Clang.
 */
#ifndef VIT_BITS_H
#define VIT_BITS_H

#include "jpeg.h"

enum {
    /* The number of zero bytes after unstuffed data. `jpeg_bits_overrun` is checked once per block,
     * so a damaged block can exceed the end by its 64 symbols of at most 16 + 15 bits: 248 bytes.
     * Up to 8 more bytes are already loaded, and each load reads 8. */
    JPEG_PADDING = 64 * 31 / 8 + 8 + 8,
};

/* ---- segments ------------------------------------------------------------------------------- */

/* Return the number of segments in the image data: one per `restart_interval` MCUs, rounded up.
 *
 * A header may claim any number. Check before allocating that it is below `size` / 2, because a
 * file cannot contain more segments.
 */
static inline size_t jpeg_num_segments(const Jpeg *jpeg) {
    size_t mcus = (size_t)jpeg->mcus_wide * jpeg->mcus_high;
    size_t interval = jpeg->restart_interval;
    return interval ? (mcus + interval - 1) / interval : 1;
}

/* Copy image data up to the next marker, with one FF for each FF 00; return the end of the copy.
 *
 * Afterwards *from is at the marker, or less than 2 bytes before `end`. The copy is never longer
 * than its source.
 */
static inline uint8_t *jpeg_unstuff(const uint8_t **from, const uint8_t *end, uint8_t *to) {
    const uint8_t *p = *from;
    for (;;) {
        const uint8_t *ff = (const uint8_t *)memchr(p, 0xFF, (size_t)(end - p));
        const uint8_t *stop = ff ? ff : end;
        memcpy(to, p, (size_t)(stop - p));
        to += stop - p;
        if (end - stop < 2 || stop[1] != 0) {
            *from = stop;
            return to;
        }
        *to++ = 0xFF;
        p = stop + 2;
    }
}

/* Return whether the marker `expected` comes next, after any number of fill bytes (B.1.1.2).
 *
 * Moves *from past that marker, or to the other marker.
 */
static inline int jpeg_pass_marker(const uint8_t **from, const uint8_t *end, int expected) {
    while (end - *from > 1 && (*from)[1] == 0xFF) ++*from;
    if (end - *from < 2 || (*from)[1] != expected) return 0;
    *from += 2;
    return 1;
}

/* ---- bits ----------------------------------------------------------------------------------- */

/* A reader of unstuffed bytes that starts at the highest bit.
 *
 * The next `count` bits are at the top of `bits`. The bits below them are either zero or equal the
 * bits that the next refill loads.
 */
typedef struct {
    uint64_t bits;
    const uint8_t *next, *end;
    uint32_t count;
} JpegBits;

static inline JpegBits jpeg_bits(const uint8_t *unstuffed, size_t size) {
    return (JpegBits){0, unstuffed, unstuffed + size, 0};
}

/* Load bits until at least 56 are available. */
static inline void jpeg_refill(JpegBits *b) {
    uint64_t word;
    memcpy(&word, b->next, 8);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    b->bits |= word >> b->count;
    b->next += (63 - b->count) >> 3;
    b->count |= 56;
}

static inline void jpeg_drop(JpegBits *b, uint32_t n) {
    b->bits <<= n;
    b->count -= n;
}

/* Return the number of bits not yet used; negative beyond the end. */
static inline ptrdiff_t jpeg_bits_left(const JpegBits *b) {
    return (b->end - b->next) * 8 + (ptrdiff_t)b->count;
}

/* Return whether more bits were used than exist. Call this after each block. */
static inline int jpeg_bits_overrun(const JpegBits *b) { return jpeg_bits_left(b) < 0; }

/* Return whether a segment was decoded to its end: less than a byte is left. */
static inline int jpeg_bits_finished(const JpegBits *b) { return (uint64_t)jpeg_bits_left(b) < 8; }

/* Return the value that `size` > 0 bits represent: a leading 0 means negative (table F.1). */
static inline int32_t jpeg_extend(uint32_t raw, uint32_t size) {
    return (int32_t)raw - (int32_t)(((raw >> (size - 1)) ^ 1) * ((1u << size) - 1));
}

#endif
