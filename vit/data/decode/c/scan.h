/* The image data of a baseline JPEG as tokens. A token is a Huffman code together with its value.
 *
 * `read_scan` decodes all segments into a `Scan`. It contains tokens and DC coefficients of each
 * block in the order of the file, and the symbol counts from which new Huffman tables are made. DC
 * differences restart at the markers to be written, not at those that were read.
 */
#ifndef VIT_SCAN_H
#define VIT_SCAN_H

#include <stdlib.h>

#include "blocks.h"

enum { MAX_TABLES = 2 /* one for luma, or all of RGB; one for chroma */ };

/* Return the table of a component in the output; as in libjpeg, chroma has the second one. */
static inline int table_of(const Jpeg *jpeg, int component) {
    return component > 0 && !jpeg->is_rgb;
}

static inline int num_tables(const Jpeg *jpeg) {
    return 1 + table_of(jpeg, jpeg->num_components - 1);
}

/* ---- tokens --------------------------------------------------------------------------------- */

/* A Huffman code and its value: bits 0-7 are the symbol, bits 16-31 the value. */
typedef uint32_t Token;

enum {
    END_OF_BLOCK = 0x00,
    ZERO_RUN = 0xF0, /* 16 zeros */
};

static inline Token make_token(uint32_t zeros, int32_t value) {
    uint32_t magnitude = (uint32_t)(value < 0 ? -value : value);
    uint32_t size = magnitude ? 32 - (uint32_t)__builtin_clz(magnitude) : 0;
    return (uint32_t)value << 16 | zeros << 4 | size;
}

static inline uint32_t symbol_of(Token token) { return token & 255; }

static inline int32_t value_of(Token token) { return (int32_t)token >> 16; }

typedef struct {
    int16_t dc;         /* the coefficient, not the difference */
    uint8_t num_tokens; /* 2 to 64; the first is the DC difference */
} TokenBlock;

/* All blocks of the image data, in the order of the file. */
typedef struct {
    uint32_t interval; /* MCUs between the markers to be written, where DC differences restart */
    Token *tokens;
    TokenBlock *blocks;
    size_t num_tokens, num_blocks;
    size_t capacity; /* of `tokens`; half of it is that of `blocks` */
    /* The symbol counts. The last AC table counts the symbols of blocks that are not written. */
    uint32_t dc_counts[MAX_TABLES][256];
    uint32_t ac_counts[MAX_TABLES + 1][256];
} Scan;

/* Make room for another MCU; return 0 if there is not enough memory.
 *
 * The memory grows with the image data that were read, not with the claims of the headers.
 */
static inline int grow(Scan *scan) {
    const size_t mcu_tokens = JPEG_MAX_MCU_BLOCKS * 65; /* `read_ac` may use one more than 64 */
    if (scan->num_tokens + mcu_tokens <= scan->capacity) return 1;
    size_t capacity = 2 * scan->capacity + mcu_tokens;
    Token *tokens = realloc(scan->tokens, capacity * sizeof *tokens);
    if (!tokens) return 0;
    scan->tokens = tokens;
    TokenBlock *blocks = realloc(scan->blocks, capacity / 2 * sizeof *blocks);
    if (!blocks) return 0;
    scan->blocks = blocks;
    scan->capacity = capacity;
    return 1;
}

/* Read the AC coefficients of a block as tokens and count their symbols.
 *
 * Zero runs before the end of the block are dropped, because this gives the shortest code. Returns
 * the number of tokens, or -1 for damage.
 */
static inline int read_ac(JpegBits *stream, const DecodeTable *table, Token *tokens,
                          uint32_t *counts) {
    JpegBits bits = *stream;
    uint32_t index = 0;
    int n = 0;
    do {
        jpeg_refill(&bits);
        for (int twice = 0; twice < 2 && index < 63; twice++) { /* 20 + 20 bits, as in `take_ac` */
            int32_t value;
            uint32_t entry = take(&bits, table, &value);
            uint32_t step = step_of(entry);
            if (__builtin_expect(step == STEP_SLOW, 0)) {
                JpegBits slow = bits; /* passing `bits` itself would force it out of registers */
                jpeg_refill(&slow);
                int slow_step = take_slow(&slow, table, entry, &value);
                jpeg_refill(&slow);
                bits = slow;
                if (slow_step < 0) return -1;
                if (slow_step == 0) goto over;
                step = (uint32_t)slow_step;
            }
            index += step;
            if (index > 63) return -1;
            tokens[n] = make_token(step - 1, value);
            counts[symbol_of(tokens[n])]++;
            n++;
        }
    } while (index < 63);
over:
    *stream = bits;
    if (n && index == 63 && symbol_of(tokens[n - 1]) != ZERO_RUN) return n;
    while (n && symbol_of(tokens[n - 1]) == ZERO_RUN) {
        counts[ZERO_RUN]--;
        n--;
    }
    tokens[n] = make_token(0, 0);
    counts[END_OF_BLOCK]++;
    return n + 1;
}

/* ---- segments ------------------------------------------------------------------------------- */

/* The position in a file's image data, and the lookup tables to read them. */
typedef struct {
    const Jpeg *jpeg;
    const uint8_t *from;      /* the next segment */
    size_t number;            /* of the next segment */
    size_t num_segments;      /* in total */
    DecodeTable dc[4], ac[4]; /* those in use */
} Reader;

static void open_reader(Reader *reader, const Jpeg *jpeg) {
    reader->jpeg = jpeg;
    reader->from = jpeg->data + jpeg->scan_offset;
    reader->number = 0;
    reader->num_segments = jpeg_num_segments(jpeg);
    int dc_in_use = 0;
    int ac_in_use = 0;
    for (int c = 0; c < jpeg->num_components; c++) {
        dc_in_use |= 1 << jpeg->components[c].dc;
        ac_in_use |= 1 << jpeg->components[c].ac;
    }
    for (int k = 0; k < 4; k++) {
        if (dc_in_use >> k & 1) make_decode_table(jpeg->dc + k, 0, reader->dc + k);
        if (ac_in_use >> k & 1) make_decode_table(jpeg->ac + k, 1, reader->ac + k);
    }
}

/* Return the number of bytes that `next_segment` needs for `count` segments of any lengths. */
static size_t segment_bytes(const Jpeg *jpeg, size_t count) {
    return jpeg->size - jpeg->scan_offset + count * JPEG_PADDING;
}

/* Copy the next segment to `to`, padded, and start `bits` at the copy.
 *
 * Returns the address to which the next segment can be copied, or NULL if the marker between them
 * is missing. `check_end` checks the bytes after the last segment.
 */
static uint8_t *next_segment(Reader *reader, uint8_t *to, JpegBits *bits) {
    const uint8_t *end = reader->jpeg->data + reader->jpeg->size;
    uint8_t *to_end = jpeg_unstuff(&reader->from, end, to);
    size_t number = reader->number++;
    memset(to_end, 0, JPEG_PADDING);
    *bits = jpeg_bits(to, (size_t)(to_end - to));
    int is_last = number + 1 >= reader->num_segments;
    if (!is_last && !jpeg_pass_marker(&reader->from, end, 0xD0 + (number & 7))) return NULL;
    return to_end + JPEG_PADDING;
}

/* Check that the end-of-image marker, and nothing else, follows the last segment.
 *
 * Files with more bytes are rejected, because these bytes may be further scans, or further images
 * to which the headers point by byte offset.
 */
static Status check_end(Reader *reader) {
    const uint8_t *end = reader->jpeg->data + reader->jpeg->size;
    if (jpeg_pass_marker(&reader->from, end, 0xD9)) {
        return reader->from == end ? JPEG_OK : TRANSCODE_TRAILING;
    }
    if (end - reader->from < 2) return JPEG_DAMAGED; /* truncated */
    uint8_t marker = reader->from[1];
    if (marker == 0 || (marker & 0xF8) == 0xD0) return JPEG_DAMAGED; /* truncated; RSTn */
    return JPEG_SCANS;
}

/* ---- reading -------------------------------------------------------------------------------- */

/* Append an MCU to the scan. Clears *good for damage.
 *
 * read_dc, written_dc: DC coefficients of the components' last blocks, in the segment being read
 * and in the one to be written.
 *
 * Blocks outside the image, in the MCUs at its right and bottom edge, are replaced by the shortest
 * possible ones, as in jpegtran: the previous block's DC coefficient, and zeros.
 */
static inline void read_mcu(const Reader *reader, uint32_t row, uint32_t column, JpegBits *bits,
                            int32_t *read_dc, int32_t *written_dc, Scan *scan, int *good) {
    for (int c = 0; c < reader->jpeg->num_components; c++) {
        const JpegComponent *component = reader->jpeg->components + c;
        const DecodeTable *dc_table = reader->dc + component->dc;
        const DecodeTable *ac_table = reader->ac + component->ac;
        int table = table_of(reader->jpeg, c);
        for (uint32_t y = row * component->v; y < (row + 1) * component->v; y++) {
            for (uint32_t x = column * component->h; x < (column + 1) * component->h; x++) {
                int outside = x >= component->blocks_wide || y >= component->blocks_high;
                uint32_t *ac_counts = scan->ac_counts[outside ? MAX_TABLES : table];
                Token *tokens = scan->tokens + scan->num_tokens;
                read_dc[c] = take_dc(bits, dc_table, read_dc[c], good);
                int n = read_ac(bits, ac_table, tokens + 1, ac_counts);
                if (n < 0 || jpeg_bits_overrun(bits)) *good = 0;
                if (!*good) return;
                int32_t dc = read_dc[c];
                if (outside) {
                    dc = written_dc[c];
                    tokens[1] = make_token(0, 0);
                    scan->ac_counts[table][END_OF_BLOCK]++;
                    n = 1;
                }
                tokens[0] = make_token(0, dc - written_dc[c]);
                scan->dc_counts[table][symbol_of(tokens[0])]++;
                scan->blocks[scan->num_blocks++] = (TokenBlock){(int16_t)dc, (uint8_t)(1 + n)};
                scan->num_tokens += 1 + (size_t)n;
                written_dc[c] = dc;
            }
        }
    }
}

/* Read all image data into *scan, whose interval is set. `unstuffed` has room for one segment. */
static Status read_scan(Reader *reader, uint8_t *unstuffed, Scan *scan) {
    const Jpeg *jpeg = reader->jpeg;
    uint32_t read_interval = jpeg->restart_interval ? jpeg->restart_interval : UINT32_MAX;
    uint32_t left_to_read = 0;
    uint32_t left_to_write = 0;
    int32_t read_dc[3];
    int32_t written_dc[3];
    JpegBits bits = {0};
    for (uint32_t row = 0; row < jpeg->mcus_high; row++) {
        for (uint32_t column = 0; column < jpeg->mcus_wide; column++) {
            if (left_to_read == 0) {
                if (!jpeg_bits_finished(&bits)) return JPEG_DAMAGED;
                if (!next_segment(reader, unstuffed, &bits)) return JPEG_DAMAGED;
                memset(read_dc, 0, sizeof read_dc);
                left_to_read = read_interval;
            }
            if (left_to_write == 0) {
                memset(written_dc, 0, sizeof written_dc);
                left_to_write = scan->interval;
            }
            left_to_read--;
            left_to_write--;
            int good = 1;
            if (!grow(scan)) return JPEG_MEMORY;
            read_mcu(reader, row, column, &bits, read_dc, written_dc, scan, &good);
            if (!good) return JPEG_DAMAGED;
        }
    }
    return jpeg_bits_finished(&bits) ? check_end(reader) : JPEG_DAMAGED;
}

#endif
