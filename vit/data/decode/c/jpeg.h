/* The headers of a baseline JPEG, up to the first byte of image data.
 *
 * `jpeg_parse` fills a `Jpeg` from the bytes of the file: frame, sampling, quantization and Huffman
 * tables, restart interval. The image data after the headers are read with bits.h.
 *
 * The bytes may come from anywhere and may claim anything. No function reads or writes outside the
 * memory that it was given. Damage results in a status, never in a guess. Where libjpeg would
 * decode with a warning, the status is JPEG_DAMAGED, and the caller passes the file to libjpeg.
 *
 * Sections ("B.2.3") and tables are those of ITU-T T.81, the JPEG standard.
 */
#ifndef VIT_JPEG_H
#define VIT_JPEG_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "status.h"

enum {
    JPEG_MAX_SIDE = 65500,    /* pixels; libjpeg's JPEG_MAX_DIMENSION (jmorecfg.h) */
    JPEG_MAX_MCU_BLOCKS = 10, /* B.2.3 */
};

typedef struct {
    uint8_t bits[17];    /* number of codes of each length; [0] is unused */
    uint8_t values[256]; /* symbols, by ascending code */
    uint8_t defined;     /* the table was read from the file and is consistent */
} JpegHuffman;

typedef struct {
    uint8_t id;
    uint8_t h, v;   /* sampling factors; 1, 1 for a single component, whose MCU is one block */
    uint8_t quant;  /* index of its quantization table */
    uint8_t dc, ac; /* indices of its Huffman tables */
    uint32_t blocks_wide, blocks_high; /* with image content; MCUs at the edges may have more */
} JpegComponent;

typedef struct {
    const uint8_t *data;
    size_t size;
    uint32_t width, height; /* pixels */
    int num_components;     /* 1 or 3 */
    JpegComponent components[3];
    int h_max, v_max; /* an MCU has 8 h_max x 8 v_max pixels */
    uint32_t mcus_wide, mcus_high;
    uint32_t restart_interval; /* MCUs; 0: no restart markers */
    int is_rgb;                /* the components are R, G, B by libjpeg's rules, not Y, Cb, Cr */
    uint16_t quant[4][64];     /* zig-zag order; valid where quant_defined */
    uint8_t quant_defined[4];
    JpegHuffman dc[4], ac[4];
    size_t sos_offset;  /* of the FF of the SOS marker */
    size_t scan_offset; /* of the first byte of image data */
} Jpeg;

/* Return the big-endian 16-bit number at `p`. */
static inline uint32_t jpeg_be16(const uint8_t *p) { return (uint32_t)p[0] << 8 | p[1]; }

static inline uint32_t jpeg_ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

/* Read the quantization tables of a DQT segment (B.2.4.1). */
static inline Status jpeg_parse_dqt(Jpeg *jpeg, const uint8_t *p, const uint8_t *end) {
    while (p < end) {
        int is_16_bit = *p >> 4;
        int index = *p & 15;
        p++;
        if (is_16_bit > 1 || index > 3 || end - p < 64 << is_16_bit) return JPEG_DAMAGED;
        for (int k = 0; k < 64; k++) {
            jpeg->quant[index][k] = (uint16_t)(is_16_bit ? jpeg_be16(p) : *p);
            p += 1 + is_16_bit;
        }
        jpeg->quant_defined[index] = 1;
    }
    return JPEG_OK;
}

/* Read the Huffman tables of a DHT segment (B.2.4.2).
 *
 * An inconsistent table stays undefined. As in libjpeg, this is an error only if the scan uses the
 * table.
 */
static inline Status jpeg_parse_dht(Jpeg *jpeg, const uint8_t *p, const uint8_t *end) {
    while (p < end) {
        if (end - p < 17) return JPEG_DAMAGED;
        int is_ac = *p >> 4;
        int index = *p & 15;
        if (is_ac > 1 || index > 3) return JPEG_DAMAGED;
        JpegHuffman *table = (is_ac ? jpeg->ac : jpeg->dc) + index;
        int count = 0;
        uint32_t code = 0; /* the next free code of each length, annex C */
        table->defined = 1;
        for (int length = 1; length <= 16; length++) {
            table->bits[length] = p[length];
            count += p[length];
            code = (code + p[length]) << 1;
            if (code > (2u << length) - 2) table->defined = 0; /* the code of all ones stays free */
        }
        p += 17;
        if (count > 256 || end - p < count) return JPEG_DAMAGED;
        memset(table->values, 0, sizeof table->values);
        memcpy(table->values, p, (size_t)count);
        for (int k = 0; k < count; k++) {
            if (!is_ac && p[k] > 15) table->defined = 0;
        }
        p += count;
    }
    return JPEG_OK;
}

/* Read the frame header: image size, components, sampling (B.2.2). */
static inline Status jpeg_parse_sof(Jpeg *jpeg, const uint8_t *p, const uint8_t *end) {
    if (end - p < 6 || end - p != 6 + 3 * p[5] || jpeg->num_components) return JPEG_DAMAGED;
    if (p[0] != 8) return JPEG_PRECISION;
    if (p[5] != 1 && p[5] != 3) return JPEG_COMPONENTS;
    jpeg->height = jpeg_be16(p + 1);
    jpeg->width = jpeg_be16(p + 3);
    /* Height 0 is legal with a DNL marker after the scan, but libjpeg rejects it too. */
    if (!jpeg->width || !jpeg->height) return JPEG_DAMAGED;
    if (jpeg->width > JPEG_MAX_SIDE || jpeg->height > JPEG_MAX_SIDE) return JPEG_DAMAGED;
    jpeg->num_components = p[5];
    int mcu_blocks = 0;
    for (int c = 0; c < jpeg->num_components; c++) {
        JpegComponent *component = jpeg->components + c;
        const uint8_t *q = p + 6 + 3 * c;
        component->id = q[0];
        component->h = q[1] >> 4;
        component->v = q[1] & 15;
        component->quant = q[2];
        if (component->h < 1 || component->h > 4) return JPEG_DAMAGED;
        if (component->v < 1 || component->v > 4) return JPEG_DAMAGED;
        if (component->quant > 3) return JPEG_DAMAGED;
        if (jpeg->num_components == 1) {
            component->h = 1;
            component->v = 1;
        }
        if (component->h > jpeg->h_max) jpeg->h_max = component->h;
        if (component->v > jpeg->v_max) jpeg->v_max = component->v;
        mcu_blocks += component->h * component->v;
    }
    if (mcu_blocks > JPEG_MAX_MCU_BLOCKS) return JPEG_DAMAGED;
    uint32_t mcu_width = 8u * (uint32_t)jpeg->h_max;
    uint32_t mcu_height = 8u * (uint32_t)jpeg->v_max;
    jpeg->mcus_wide = jpeg_ceil_div(jpeg->width, mcu_width);
    jpeg->mcus_high = jpeg_ceil_div(jpeg->height, mcu_height);
    for (int c = 0; c < jpeg->num_components; c++) {
        JpegComponent *component = jpeg->components + c;
        component->blocks_wide = jpeg_ceil_div(jpeg->width * component->h, mcu_width);
        component->blocks_high = jpeg_ceil_div(jpeg->height * component->v, mcu_height);
    }
    return JPEG_OK;
}

/* Read the scan header: the tables that each component uses (B.2.3). */
static inline Status jpeg_parse_sos(Jpeg *jpeg, const uint8_t *p, const uint8_t *end) {
    if (!jpeg->num_components || end - p < 1 || end - p != 4 + 2 * p[0]) return JPEG_DAMAGED;
    if (p[0] != jpeg->num_components) return JPEG_SCANS;
    for (int c = 0; c < jpeg->num_components; c++) {
        JpegComponent *component = jpeg->components + c;
        const uint8_t *q = p + 1 + 2 * c;
        component->dc = q[1] >> 4;
        component->ac = q[1] & 15;
        if (q[0] != component->id || component->dc > 3 || component->ac > 3) return JPEG_DAMAGED;
        if (!jpeg->dc[component->dc].defined || !jpeg->ac[component->ac].defined) {
            return JPEG_DAMAGED;
        }
        if (!jpeg->quant_defined[component->quant]) return JPEG_DAMAGED;
    }
    const uint8_t *spectral = end - 3;
    int is_sequential = spectral[0] == 0 && spectral[1] == 63 && spectral[2] == 0;
    return is_sequential ? JPEG_OK : JPEG_DAMAGED;
}

/* Guess whether three components are RGB, like `default_decompress_parms` of jdapimin.c. */
static inline int jpeg_guess_rgb(const Jpeg *jpeg, int jfif, int adobe_transform) {
    if (jpeg->num_components != 3 || jfif) return 0;
    if (adobe_transform >= 0) return adobe_transform == 0;
    const JpegComponent *components = jpeg->components;
    return components[0].id == 'R' && components[1].id == 'G' && components[2].id == 'B';
}

/* Fill *jpeg from the headers of `data`. `data` must outlive *jpeg. */
static inline Status jpeg_parse(const uint8_t *data, size_t size, Jpeg *jpeg) {
    memset(jpeg, 0, sizeof *jpeg);
    jpeg->data = data;
    jpeg->size = size;
    if (size < 4 || data[0] != 0xFF || data[1] != 0xD8) return JPEG_DAMAGED;
    int jfif = 0;
    int adobe_transform = -1;
    size_t at = 2;
    for (;;) {
        size_t marker_at = at;
        if (at >= size || data[at] != 0xFF) return JPEG_DAMAGED;
        while (at < size && data[at] == 0xFF) at++; /* fill bytes, B.1.1.2 */
        if (size - at < 3) return JPEG_DAMAGED;
        int marker = data[at++];
        size_t length = jpeg_be16(data + at);
        if (length < 2 || length > size - at) return JPEG_DAMAGED;
        const uint8_t *p = data + at + 2;
        const uint8_t *end = data + at + length;
        Status status = JPEG_OK;
        switch (marker) {
        case 0xC0: /* SOF0: baseline */
        case 0xC1: /* SOF1: extended sequential, which is baseline with more tables */
            status = jpeg_parse_sof(jpeg, p, end);
            break;
        case 0xC2: /* SOF2 */
            return JPEG_PROGRESSIVE;
        case 0xC3: /* the other SOFn, and DAC of arithmetic coding */
        case 0xC5:
        case 0xC6:
        case 0xC7:
        case 0xC9:
        case 0xCA:
        case 0xCB:
        case 0xCC:
        case 0xCD:
        case 0xCE:
        case 0xCF:
            return JPEG_PROCESS;
        case 0xC4: /* DHT */
            status = jpeg_parse_dht(jpeg, p, end);
            break;
        case 0xDB: /* DQT */
            status = jpeg_parse_dqt(jpeg, p, end);
            break;
        case 0xDD: /* DRI */
            if (end - p != 2) return JPEG_DAMAGED;
            jpeg->restart_interval = jpeg_be16(p);
            break;
        case 0xDA: /* SOS: the image data follow */
            status = jpeg_parse_sos(jpeg, p, end);
            jpeg->sos_offset = marker_at;
            jpeg->scan_offset = at + length;
            /* No color space has such a number; libjpeg warns and assumes YCbCr. */
            if (jpeg->num_components == 3 && !jfif && adobe_transform > 1) return JPEG_DAMAGED;
            jpeg->is_rgb = jpeg_guess_rgb(jpeg, jfif, adobe_transform);
            return status;
        case 0xE0: /* APP0 */
            if (end - p < 14 || memcmp(p, "JFIF", 5)) break;
            if (p[5] != 1) return JPEG_DAMAGED; /* no other major version exists */
            jfif = 1;
            break;
        case 0xEE: /* APP14 */
            if (end - p >= 12 && !memcmp(p, "Adobe", 5)) adobe_transform = p[11];
            break;
        case 0xFE: /* COM */
            break;
        default: /* APPn may contain anything; RSTn, EOI, SOI, DNL, DHP, EXP must not occur here */
            if (marker < 0xE0 || marker > 0xEF) return JPEG_DAMAGED;
        }
        if (status != JPEG_OK) return status;
        at += length;
    }
}

#endif
