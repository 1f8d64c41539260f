/* Baseline JPEG as a stream of bits: headers, restart segments, bits. What the bits mean is in blocks.h.
 *
 * The data's story: `jpeg_parse` reads the headers up to the image data, which are cut into segments by restart markers (one segment if there
 * are none). `jpeg_unstuff` copies a segment without its stuffed zero bytes, `jpeg_pass_marker` looks at what ends it, and from the copy, with
 * padding behind, come bits.
 *
 * Bytes come from anywhere and may lie. Nothing here reads or writes outside of what it is given; damage is a status, never a guess: what
 * libjpeg would decode with a warning is JPEG_DAMAGED, so the caller leaves such files to libjpeg.
 * Sections ("B.2.3") and tables are those of ITU-T T.81, the JPEG standard. Needs a byte order and `__builtin_clz` as GCC and Clang have them.
 */
#ifndef VIT_JPEG_H
#define VIT_JPEG_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Known by number to vit/data/decode/native.py and data_prep/write/restart_markers.py. */
typedef enum {
    JPEG_OK = 0,
    JPEG_DAMAGED = 1,     /* cut off, or against the standard */
    JPEG_PROGRESSIVE = 2, /* Huffman-coded, but progressive */
    JPEG_PROCESS = 3,     /* arithmetic, lossless or hierarchical */
    JPEG_PRECISION = 4,   /* not 8 bits a sample */
    JPEG_COMPONENTS = 5,  /* neither 1 nor 3: CMYK and the like */
    JPEG_SCANS = 6,       /* the components come in scans of their own */
    JPEG_MEMORY = 7,      /* malloc failed, or a buffer of the caller's is too small */
} JpegStatus;

enum {
    JPEG_MAX_SIDE = 65500,    /* pixels; libjpeg's JPEG_MAX_DIMENSION (jmorecfg.h) */
    JPEG_MAX_MCU_BLOCKS = 10, /* B.2.3 */
    /* Zero bytes behind unstuffed data. Whether bits were used up is asked after each block only (`jpeg_bits_overrun`), so a damaged one can
     * run beyond the end by its 64 symbols of at most 16 + 15 bits: 248 bytes. Less than 8 bytes more are at hand, and 8 are read at once. */
    JPEG_PADDING = 64 * 31 / 8 + 8 + 8,
};

typedef struct {
    uint8_t bits[17];    /* codes of each length; [0] is unused */
    uint8_t values[256]; /* symbols, by ascending code */
    uint8_t defined;
} JpegHuffman;

typedef struct {
    uint8_t id;
    uint8_t h, v;       /* sampling factors; 1, 1 if the image has one component only, whose MCU is a block whatever the file says */
    uint8_t quant;      /* number of its table */
    uint8_t dc, ac;     /* numbers of its tables */
    uint32_t blocks_wide, blocks_high; /* that hold image; the MCUs at the right and bottom edge may hold further ones */
} JpegComponent;

typedef struct {
    const uint8_t *data;
    size_t size;
    uint32_t width, height; /* pixels */
    int num_components;     /* 1 or 3 */
    JpegComponent components[3];
    int h_max, v_max;               /* an MCU has 8 h_max x 8 v_max pixels */
    uint32_t mcus_wide, mcus_high;
    uint32_t restart_interval;      /* MCUs; 0: no markers */
    int is_rgb;                     /* three components that are red, green, blue, by libjpeg's rules; else Y, Cb, Cr */
    uint16_t quant[4][64];          /* in zig-zag order; see quant_defined */
    uint8_t quant_defined[4];
    JpegHuffman dc[4], ac[4];
    size_t sos_offset;              /* of the FF of the SOS marker */
    size_t scan_offset;             /* first byte of image data */
} Jpeg;

/* ---- headers ---------------------------------------------------------------------------------------------------- */

static inline uint32_t jpeg_be16(const uint8_t *p) { return (uint32_t)p[0] << 8 | p[1]; }

static inline uint32_t jpeg_ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

static inline JpegStatus jpeg_parse_dqt(Jpeg *jpeg, const uint8_t *p, const uint8_t *end) {
    while (p < end) {
        int wide = *p >> 4, number = *p & 15; /* 8- or 16-bit values */
        p++;
        if (wide > 1 || number > 3 || end - p < 64 << wide) return JPEG_DAMAGED;
        for (int k = 0; k < 64; k++, p += 1 + wide) jpeg->quant[number][k] = (uint16_t)(wide ? jpeg_be16(p) : *p);
        jpeg->quant_defined[number] = 1;
    }
    return JPEG_OK;
}

static inline JpegStatus jpeg_parse_dht(Jpeg *jpeg, const uint8_t *p, const uint8_t *end) {
    while (p < end) {
        if (end - p < 17) return JPEG_DAMAGED;
        int is_ac = *p >> 4, number = *p & 15, count = 0;
        if (is_ac > 1 || number > 3) return JPEG_DAMAGED;
        JpegHuffman *table = (is_ac ? jpeg->ac : jpeg->dc) + number;
        uint32_t code = 0; /* the next free one of each length, annex C; the one of all ones must stay free */
        table->defined = 1; /* unless it makes no sense: libjpeg minds that only if the table is used */
        for (int length = 1; length <= 16; length++) {
            table->bits[length] = p[length];
            count += p[length];
            code = (code + p[length]) << 1;
            if (code > (2u << length) - 2) table->defined = 0;
        }
        p += 17;
        if (count > 256 || end - p < count) return JPEG_DAMAGED;
        memset(table->values, 0, sizeof table->values);
        memcpy(table->values, p, (size_t)count);
        for (int k = 0; k < count; k++)
            if (!is_ac && p[k] > 15) table->defined = 0;
        p += count;
    }
    return JPEG_OK;
}

static inline JpegStatus jpeg_parse_sof(Jpeg *jpeg, const uint8_t *p, const uint8_t *end) {
    if (end - p < 6 || end - p != 6 + 3 * p[5] || jpeg->num_components) return JPEG_DAMAGED;
    if (p[0] != 8) return JPEG_PRECISION;
    if (p[5] != 1 && p[5] != 3) return JPEG_COMPONENTS;
    jpeg->height = jpeg_be16(p + 1);
    jpeg->width = jpeg_be16(p + 3);
    if (!jpeg->width || !jpeg->height) return JPEG_DAMAGED; /* a height of 0 is legal, if a DNL marker follows; libjpeg refuses it too */
    if (jpeg->width > JPEG_MAX_SIDE || jpeg->height > JPEG_MAX_SIDE) return JPEG_DAMAGED;
    jpeg->num_components = p[5];
    int mcu_blocks = 0;
    for (int k = 0; k < jpeg->num_components; k++) {
        JpegComponent *component = jpeg->components + k;
        const uint8_t *q = p + 6 + 3 * k;
        component->id = q[0];
        component->h = q[1] >> 4;
        component->v = q[1] & 15;
        component->quant = q[2];
        if (component->h < 1 || component->h > 4 || component->v < 1 || component->v > 4 || component->quant > 3) return JPEG_DAMAGED;
        if (jpeg->num_components == 1) component->h = component->v = 1;
        if (component->h > jpeg->h_max) jpeg->h_max = component->h;
        if (component->v > jpeg->v_max) jpeg->v_max = component->v;
        mcu_blocks += component->h * component->v;
    }
    if (mcu_blocks > JPEG_MAX_MCU_BLOCKS) return JPEG_DAMAGED;
    jpeg->mcus_wide = jpeg_ceil_div(jpeg->width, 8u * (uint32_t)jpeg->h_max);
    jpeg->mcus_high = jpeg_ceil_div(jpeg->height, 8u * (uint32_t)jpeg->v_max);
    for (int k = 0; k < jpeg->num_components; k++) {
        JpegComponent *component = jpeg->components + k;
        component->blocks_wide = jpeg_ceil_div(jpeg->width * component->h, 8u * (uint32_t)jpeg->h_max);
        component->blocks_high = jpeg_ceil_div(jpeg->height * component->v, 8u * (uint32_t)jpeg->v_max);
    }
    return JPEG_OK;
}

static inline JpegStatus jpeg_parse_sos(Jpeg *jpeg, const uint8_t *p, const uint8_t *end) {
    if (!jpeg->num_components || end - p < 1 || end - p != 4 + 2 * p[0]) return JPEG_DAMAGED;
    if (p[0] != jpeg->num_components) return JPEG_SCANS;
    for (int k = 0; k < jpeg->num_components; k++) {
        JpegComponent *component = jpeg->components + k;
        const uint8_t *q = p + 1 + 2 * k;
        component->dc = q[1] >> 4;
        component->ac = q[1] & 15;
        if (q[0] != component->id || component->dc > 3 || component->ac > 3) return JPEG_DAMAGED;
        if (!jpeg->dc[component->dc].defined || !jpeg->ac[component->ac].defined) return JPEG_DAMAGED;
        if (!jpeg->quant_defined[component->quant]) return JPEG_DAMAGED;
    }
    const uint8_t *spectral = end - 3;
    return spectral[0] == 0 && spectral[1] == 63 && spectral[2] == 0 ? JPEG_OK : JPEG_DAMAGED;
}

/* Whether three components are RGB, as `default_decompress_parms` of libjpeg (jdapimin.c) guesses it. */
static inline int jpeg_guess_rgb(const Jpeg *jpeg, int jfif, int adobe_transform) {
    if (jpeg->num_components != 3 || jfif) return 0;
    if (adobe_transform >= 0) return adobe_transform == 0;
    return jpeg->components[0].id == 'R' && jpeg->components[1].id == 'G' && jpeg->components[2].id == 'B';
}

/* Fill *jpeg from the headers of `data`, which it goes on pointing to. */
static inline JpegStatus jpeg_parse(const uint8_t *data, size_t size, Jpeg *jpeg) {
    memset(jpeg, 0, sizeof *jpeg);
    jpeg->data = data;
    jpeg->size = size;
    if (size < 4 || data[0] != 0xFF || data[1] != 0xD8) return JPEG_DAMAGED;
    int jfif = 0, adobe_transform = -1;
    size_t at = 2;
    for (;;) {
        size_t marker_at = at;
        if (at >= size || data[at] != 0xFF) return JPEG_DAMAGED;
        while (at < size && data[at] == 0xFF) at++; /* fill bytes, B.1.1.2 */
        if (size - at < 3) return JPEG_DAMAGED;
        int marker = data[at++];
        size_t length = jpeg_be16(data + at);
        if (length < 2 || length > size - at) return JPEG_DAMAGED;
        const uint8_t *p = data + at + 2, *end = data + at + length;
        JpegStatus status = JPEG_OK;
        switch (marker) {
        case 0xC0: case 0xC1: status = jpeg_parse_sof(jpeg, p, end); break;
        case 0xC2: return JPEG_PROGRESSIVE;
        case 0xC3: case 0xC5: case 0xC6: case 0xC7: case 0xC9: case 0xCA: case 0xCB: case 0xCC: case 0xCD: case 0xCE: case 0xCF:
            return JPEG_PROCESS;
        case 0xC4: status = jpeg_parse_dht(jpeg, p, end); break;
        case 0xDB: status = jpeg_parse_dqt(jpeg, p, end); break;
        case 0xDD:
            if (end - p != 2) return JPEG_DAMAGED;
            jpeg->restart_interval = jpeg_be16(p);
            break;
        case 0xDA:
            status = jpeg_parse_sos(jpeg, p, end);
            jpeg->sos_offset = marker_at;
            jpeg->scan_offset = at + length;
            if (jpeg->num_components == 3 && !jfif && adobe_transform > 1) return JPEG_DAMAGED; /* colours that nobody knows */
            jpeg->is_rgb = jpeg_guess_rgb(jpeg, jfif, adobe_transform);
            return status;
        case 0xE0:
            if (end - p < 14 || memcmp(p, "JFIF", 5)) break;
            if (p[5] != 1) return JPEG_DAMAGED; /* there is no other version */
            jfif = 1;
            break;
        case 0xEE: if (end - p >= 12 && !memcmp(p, "Adobe", 5)) adobe_transform = p[11]; break;
        case 0xFE: break;
        default: if (marker < 0xE0 || marker > 0xEF) return JPEG_DAMAGED; /* RSTn, EOI, a second SOI, DNL, DHP, EXP, JPG, reserved ones */
        }
        if (status != JPEG_OK) return status;
        at += length;
    }
}

/* ---- segments --------------------------------------------------------------------------------------------------- */

/* How many segments the image data have: one for each `restart_interval` MCUs begun. Headers lie: more than a half of `size` cannot be
 * there, so do not allocate for them. */
static inline size_t jpeg_num_segments(const Jpeg *jpeg) {
    size_t mcus = (size_t)jpeg->mcus_wide * jpeg->mcus_high, interval = jpeg->restart_interval;
    return interval ? (mcus + interval - 1) / interval : 1;
}

/* Copy image data up to a marker, with a single FF for each FF 00; *from then is at the marker, or less than 2 bytes before `end`. Returns
 * where the copy ends; it is not longer than what it was made of. */
static inline uint8_t *jpeg_unstuff(const uint8_t **from, const uint8_t *end, uint8_t *to) {
    const uint8_t *p = *from;
    for (;;) {
        const uint8_t *ff = (const uint8_t *)memchr(p, 0xFF, (size_t)(end - p)), *stop = ff ? ff : end;
        memcpy(to, p, (size_t)(stop - p));
        to += stop - p;
        if (end - stop < 2 || stop[1] != 0) return *from = stop, to;
        *to++ = 0xFF, p = stop + 2;
    }
}

/* Whether the marker `expected` comes next, behind any number of fill bytes (B.1.1.2); then *from is behind it, else at the other one. */
static inline int jpeg_pass_marker(const uint8_t **from, const uint8_t *end, int expected) {
    while (end - *from > 1 && (*from)[1] == 0xFF) ++*from;
    if (end - *from < 2 || (*from)[1] != expected) return 0;
    *from += 2;
    return 1;
}

/* ---- bits ------------------------------------------------------------------------------------------------------- */

/* Reads unstuffed bytes from the highest bit on. `bits` holds the next `count` ones on its left; what is right of them is either zero or the
 * very bits that the next refill brings. */
typedef struct {
    uint64_t bits;
    const uint8_t *next, *end;
    uint32_t count;
} JpegBits;

static inline JpegBits jpeg_bits(const uint8_t *unstuffed, size_t size) { return (JpegBits){0, unstuffed, unstuffed + size, 0}; }

/* Have 56 bits or more at hand. */
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

/* Bits not yet used; negative beyond the end. */
static inline ptrdiff_t jpeg_bits_left(const JpegBits *b) { return (b->end - b->next) * 8 + (ptrdiff_t)b->count; }

/* Whether more bits were used than there are. To be asked after each block, see JPEG_PADDING. */
static inline int jpeg_bits_overrun(const JpegBits *b) { return jpeg_bits_left(b) < 0; }

/* Whether a segment was decoded to its very end: less than a byte is left. */
static inline int jpeg_bits_finished(const JpegBits *b) { return (uint64_t)jpeg_bits_left(b) < 8; }

/* A value of `size` bits as table F.1 means it: those with a leading 0 are negative. */
static inline int32_t jpeg_extend(uint32_t raw, uint32_t size) {
    return (int32_t)raw - (int32_t)(((raw >> (size - 1)) ^ 1) * ((1u << size) - 1)); /* not for size 0 */
}

#endif
