/* Lossless transcoding of a baseline JPEG: the same coefficients, with Huffman tables made for them and a restart marker every few MCUs.
 *
 * The data's story: the image data are read as tokens, one for each Huffman code with its value, and counted. The counts give the best tables
 * (annex K.2 of T.81), with which the tokens are written again. The headers stay as they are, but for Huffman tables, restart interval and
 * start of scan. In the end the result is decoded and all coefficients are compared: what is not proven equal is not returned.
 *
 * From the first Huffman table to the end the result has the bytes that `jpegtran -optimize -restart` of libjpeg-turbo writes. So the blocks
 * outside of the image, in the MCUs of its right and bottom edge, are not kept: they become the shortest ones there are.
 */
#include <stdlib.h>

#include "blocks.h"
#include "huffman.h"
#include "jpeg.h"

enum { TRANSCODE_TRAILING = 16, TRANSCODE_UNPROVEN = 17 }; /* JpegStatus goes on; Status in data_prep/write/restart_markers.py */

enum {
    WANTED_SEGMENTS = 8, /* of a row of MCUs: tiles of some 64 pixels, of which a crop keeps 55 % of an image; of four tiles a row, 62 % */
    LEAST_MCUS = 2,      /* of a segment, as each costs some 4 bytes */
    MAX_AC_BITS = 10,    /* of a value; more are no image of 8 bits, and jpegtran refuses them */
    MAX_DC_BITS = 11,
    MAX_TABLES = 2,      /* luma, or all of RGB; chroma */
};

/* MCUs between two markers: a divisor of those in a row, so that all rows are cut at the same places. The largest that gives WANTED_SEGMENTS;
 * else the one that gives most; else the row is one segment. */
static uint32_t choose_interval(uint32_t mcus_wide) {
    uint32_t smallest = 0, largest = 0;
    for (uint32_t interval = LEAST_MCUS; interval <= mcus_wide / 2; interval++) {
        if (mcus_wide % interval) continue;
        if (!smallest) smallest = interval;
        if (mcus_wide / interval >= WANTED_SEGMENTS) largest = interval;
    }
    return largest ? largest : smallest ? smallest : mcus_wide;
}

/* Luma and RGB have the first table, chroma the second, as libjpeg writes them. */
static inline int table_of(const Jpeg *jpeg, int component) { return component > 0 && !jpeg->is_rgb; }

static inline int num_tables(const Jpeg *jpeg) { return 1 + table_of(jpeg, jpeg->num_components - 1); }

static inline uint32_t num_mcu_blocks(const Jpeg *jpeg) {
    uint32_t n = 0;
    for (int c = 0; c < jpeg->num_components; c++) n += (uint32_t)jpeg->components[c].h * jpeg->components[c].v;
    return n;
}

/* ---- tokens ------------------------------------------------------------------------------------------------------- */

/* A Huffman code and what follows it: bits 0-7 the symbol, bits 16-31 the value. */
typedef uint32_t Token;

enum { END_OF_BLOCK = 0x00, ZERO_RUN = 0xF0 /* 16 zeros */ };

static inline Token make_token(uint32_t zeros, int32_t value) {
    uint32_t magnitude = (uint32_t)(value < 0 ? -value : value);
    return (uint32_t)value << 16 | zeros << 4 | (magnitude ? 32 - (uint32_t)__builtin_clz(magnitude) : 0);
}

static inline uint32_t symbol_of(Token token) { return token & 255; }

static inline int32_t value_of(Token token) { return (int32_t)token >> 16; }

typedef struct {
    int16_t dc;         /* coefficient, not difference */
    uint8_t num_tokens; /* 2 to 64; the first is that of the DC difference */
} Block;

/* All blocks of the image data, in the order of the file. */
typedef struct {
    uint32_t interval; /* MCUs between the markers that DC differences are meant for */
    Token *tokens;
    Block *blocks;
    size_t num_tokens, num_blocks, room; /* room: in `tokens`; half as many in `blocks` */
    uint32_t dc_counts[MAX_TABLES][256], ac_counts[MAX_TABLES + 1][256]; /* of symbols; the last counts what will not be written */
} Scan;

/* Make room for another MCU; 0 if there is no memory. It goes by what the image data held so far, not by what the headers promise. */
static inline int grow(Scan *scan) {
    const size_t of_mcu = JPEG_MAX_MCU_BLOCKS * 65; /* `read_ac` may use one token more than it returns */
    if (scan->num_tokens + of_mcu <= scan->room) return 1;
    size_t room = 2 * scan->room + of_mcu;
    Token *tokens = realloc(scan->tokens, room * sizeof *tokens);
    if (!tokens) return 0;
    scan->tokens = tokens;
    Block *blocks = realloc(scan->blocks, room / 2 * sizeof *blocks);
    if (!blocks) return 0;
    scan->blocks = blocks;
    scan->room = room;
    return 1;
}

/* Read the AC coefficients of a block as tokens, in the one best way: no 16 zeros before the block's end. Returns their number, -1 for damage. */
static inline int read_ac(JpegBits *stream, const Codes *codes, Token *tokens, uint32_t *counts) {
    JpegBits bits = *stream;
    uint32_t place = 0;
    int n = 0;
    do {
        jpeg_refill(&bits);
        for (int twice = 0; twice < 2 && place < 63; twice++) { /* as in `take_ac` */
            int32_t value;
            uint32_t entry = take(&bits, codes, &value), step = step_of(entry);
            if (__builtin_expect(step == STEP_ELSEWHERE, 0)) {
                JpegBits slow = bits; /* a copy, so that `bits` itself can stay in registers */
                jpeg_refill(&slow);
                int slow_step = take_elsewhere(&slow, codes, entry, &value);
                jpeg_refill(&slow);
                bits = slow;
                if (slow_step < 0) return -1;
                if (!slow_step) goto over;
                step = (uint32_t)slow_step;
            }
            place += step;
            if (place > 63) return -1;
            tokens[n] = make_token(step - 1, value);
            counts[symbol_of(tokens[n++])]++;
        }
    } while (place < 63);
over:
    *stream = bits;
    if (n && place == 63 && symbol_of(tokens[n - 1]) != ZERO_RUN) return n;
    for (; n && symbol_of(tokens[n - 1]) == ZERO_RUN; n--) counts[ZERO_RUN]--;
    tokens[n] = make_token(0, 0);
    counts[END_OF_BLOCK]++;
    return n + 1;
}

/* ---- reading ------------------------------------------------------------------------------------------------------ */

/* Where a file is read, and its tables ready for use. */
typedef struct {
    const Jpeg *jpeg;
    const uint8_t *from;         /* the next segment */
    size_t number, num_segments; /* of the next one; in all */
    Codes dc[4], ac[4];          /* that are in use */
} Reader;

static void open_reader(Reader *reader, const Jpeg *jpeg) {
    reader->jpeg = jpeg;
    reader->from = jpeg->data + jpeg->scan_offset;
    reader->number = 0;
    reader->num_segments = jpeg_num_segments(jpeg);
    int dc_in_use = 0, ac_in_use = 0;
    for (int c = 0; c < jpeg->num_components; c++) dc_in_use |= 1 << jpeg->components[c].dc, ac_in_use |= 1 << jpeg->components[c].ac;
    for (int k = 0; k < 4; k++) {
        if (dc_in_use >> k & 1) make_codes(jpeg->dc + k, 0, reader->dc + k);
        if (ac_in_use >> k & 1) make_codes(jpeg->ac + k, 1, reader->ac + k);
    }
}

/* Bytes for `count` segments as `next_segment` copies them, whatever their lengths. */
static size_t segment_room(const Jpeg *jpeg, size_t count) { return jpeg->size - jpeg->scan_offset + count * JPEG_PADDING; }

/* Copy the next segment to `to`, padded, for `bits` to be read from. Returns where the next one can be copied to, NULL if the marker behind it
 * is missing. What is behind the last one is for `what_follows`. */
static uint8_t *next_segment(Reader *reader, uint8_t *to, JpegBits *bits) {
    const uint8_t *end = reader->jpeg->data + reader->jpeg->size;
    uint8_t *to_end = jpeg_unstuff(&reader->from, end, to);
    size_t number = reader->number++;
    memset(to_end, 0, JPEG_PADDING);
    *bits = jpeg_bits(to, (size_t)(to_end - to));
    if (number + 1 < reader->num_segments && !jpeg_pass_marker(&reader->from, end, 0xD0 + (number & 7))) return NULL;
    return to_end + JPEG_PADDING;
}

/* Whether the image data, which were read, end with the end mark and nothing else behind. Files with other bytes are not for us: they may be
 * further scans, or further images to which headers tell the way in bytes. */
static int what_follows(Reader *reader) {
    const uint8_t *end = reader->jpeg->data + reader->jpeg->size;
    if (jpeg_pass_marker(&reader->from, end, 0xD9)) return reader->from == end ? JPEG_OK : TRANSCODE_TRAILING;
    if (end - reader->from < 2 || reader->from[1] == 0 || (reader->from[1] & 0xF8) == 0xD0) return JPEG_DAMAGED; /* cut off; RSTn */
    return JPEG_SCANS;
}

/* Append an MCU, and set *good to 0 for damage. read_dc, written_dc: the DC coefficients of the components' last blocks in the segment that is
 * read and in the one to be written, whose markers are in other places. */
static inline void read_mcu(const Reader *reader, uint32_t row, uint32_t column, JpegBits *bits, int32_t *read_dc, int32_t *written_dc,
                                                        Scan *scan, int *good) {
    for (int c = 0; c < reader->jpeg->num_components; c++) {
        const JpegComponent *component = reader->jpeg->components + c;
        int table = table_of(reader->jpeg, c);
        for (uint32_t y = row * component->v; y < (row + 1) * component->v; y++) {
            for (uint32_t x = column * component->h; x < (column + 1) * component->h; x++) {
                int outside = x >= component->blocks_wide || y >= component->blocks_high;
                Token *tokens = scan->tokens + scan->num_tokens;
                read_dc[c] = take_dc(bits, reader->dc + component->dc, read_dc[c], good);
                int n = read_ac(bits, reader->ac + component->ac, tokens + 1, scan->ac_counts[outside ? MAX_TABLES : table]);
                if (n < 0 || jpeg_bits_overrun(bits)) *good = 0;
                if (!*good) return;
                int32_t dc = read_dc[c];
                if (outside) { /* the DC coefficient of the block before, all others zero */
                    dc = written_dc[c];
                    tokens[1] = make_token(0, 0);
                    scan->ac_counts[table][END_OF_BLOCK]++;
                    n = 1;
                }
                tokens[0] = make_token(0, dc - written_dc[c]);
                scan->dc_counts[table][symbol_of(tokens[0])]++;
                scan->blocks[scan->num_blocks++] = (Block){(int16_t)dc, (uint8_t)(1 + n)};
                scan->num_tokens += 1 + (size_t)n;
                written_dc[c] = dc;
            }
        }
    }
}

/* Read all image data; scan->interval is set. `unstuffed` has room for a segment. */
static int read_scan(Reader *reader, uint8_t *unstuffed, Scan *scan) {
    const Jpeg *jpeg = reader->jpeg;
    uint32_t left_to_read = 0, left_to_write = 0;
    int32_t read_dc[3], written_dc[3];
    JpegBits bits = {0};
    for (uint32_t row = 0; row < jpeg->mcus_high; row++) {
        for (uint32_t column = 0; column < jpeg->mcus_wide; column++) {
            if (!left_to_read--) {
                if (!jpeg_bits_finished(&bits) || !next_segment(reader, unstuffed, &bits)) return JPEG_DAMAGED;
                memset(read_dc, 0, sizeof read_dc);
                left_to_read = (jpeg->restart_interval ? jpeg->restart_interval : UINT32_MAX) - 1;
            }
            if (!left_to_write--) {
                memset(written_dc, 0, sizeof written_dc);
                left_to_write = scan->interval - 1;
            }
            int good = 1;
            if (!grow(scan)) return JPEG_MEMORY;
            read_mcu(reader, row, column, &bits, read_dc, written_dc, scan, &good);
            if (!good) return JPEG_DAMAGED;
        }
    }
    return jpeg_bits_finished(&bits) ? what_follows(reader) : JPEG_DAMAGED;
}

/* ---- writing ------------------------------------------------------------------------------------------------------ */

/* Copy the headers up to the start of scan, without Huffman tables and restart interval; returns the end. */
static uint8_t *copy_headers(const Jpeg *jpeg, uint8_t *to) {
    memcpy(to, jpeg->data, 2);
    to += 2;
    for (size_t at = 2, begin = 2; at < jpeg->sos_offset; begin = at) { /* `jpeg_parse` has gone the same way */
        while (jpeg->data[at] == 0xFF) at++;
        uint8_t marker = jpeg->data[at++];
        at += jpeg_be16(jpeg->data + at);
        if (marker == 0xC4 || marker == 0xDD) continue;
        memcpy(to, jpeg->data + begin, at - begin);
        to += at - begin;
    }
    return to;
}

/* Write the other headers: tables, interval, start of scan; returns the end. */
static uint8_t *write_headers(const Jpeg *jpeg, uint32_t interval, const JpegHuffman *dc, const JpegHuffman *ac, uint8_t *to) {
    for (int k = 0; k < num_tables(jpeg); k++) to = write_table(ac + k, (uint8_t)(0x10 | k), write_table(dc + k, (uint8_t)k, to));
    uint8_t n = (uint8_t)jpeg->num_components;
    const uint8_t head[11] = {0xFF, 0xDD, 0, 4, (uint8_t)(interval >> 8), (uint8_t)interval, 0xFF, 0xDA, 0, (uint8_t)(6 + 2 * n), n};
    memcpy(to, head, sizeof head);
    to += sizeof head;
    for (int c = 0; c < n; c++) {
        *to++ = jpeg->components[c].id;
        *to++ = (uint8_t)(table_of(jpeg, c) * 0x11);
    }
    const uint8_t whole_blocks[3] = {0, 63, 0};
    memcpy(to, whole_blocks, 3);
    return to + 3;
}

/* Write all segments and the end mark; returns the end. `unstuffed` has room for a segment and 8 bytes. */
static uint8_t *write_segments(const Jpeg *jpeg, const Scan *scan, const Written *dc, const Written *ac, uint8_t *unstuffed, uint8_t *to) {
    const Token *token = scan->tokens;
    const Block *block = scan->blocks, *last = block + scan->num_blocks;
    for (int segment = 0; block < last; segment++) {
        Writer writer = {0, unstuffed, 0};
        for (uint32_t mcu = 0; mcu < scan->interval; mcu++) {
            for (int c = 0; c < jpeg->num_components; c++) {
                const Written *of_dc = dc + table_of(jpeg, c), *of_ac = ac + table_of(jpeg, c);
                for (int k = jpeg->components[c].h * jpeg->components[c].v; k > 0; k--, block++) {
                    const Token *end = token + block->num_tokens;
                    put(&writer, of_dc, symbol_of(*token), value_of(*token)), token++;
                    for (; token < end; token++) put(&writer, of_ac, symbol_of(*token), value_of(*token));
                }
            }
        }
        if (writer.count) *writer.next++ = (uint8_t)(writer.bits << (8 - writer.count) | 0xFF >> writer.count); /* filled up with ones, F.1.2.3 */
        to = stuff(unstuffed, writer.next, to);
        *to++ = 0xFF;
        *to++ = block < last ? (uint8_t)(0xD0 + (segment & 7)) : 0xD9;
    }
    return to;
}

/* Bytes that the image data have at most when written; 0 for values that are no image of 8 bits. */
static size_t most_bytes(const Jpeg *jpeg, const Scan *scan, const Written *dc, const Written *ac) {
    uint64_t bits = 0;
    for (int k = 0; k < num_tables(jpeg); k++) {
        for (int symbol = 0; symbol < 256; symbol++) {
            uint32_t of_dc = scan->dc_counts[k][symbol], of_ac = scan->ac_counts[k][symbol];
            if ((of_dc && symbol > MAX_DC_BITS) || (of_ac && (symbol & 15) > MAX_AC_BITS)) return 0;
            bits += (uint64_t)of_dc * dc[k].length[symbol] + (uint64_t)of_ac * ac[k].length[symbol];
        }
    }
    /* Stuffing doubles a segment at most; its last byte is filled up, and a marker follows. */
    return (size_t)(2 * (bits / 8 + 1) + 4 * (uint64_t)jpeg->mcus_high * (jpeg->mcus_wide / scan->interval));
}

/* ---- the proof ---------------------------------------------------------------------------------------------------- */

/* Bits that differ between a block's coefficients, in natural order, and those of its tokens. Clears the coefficients. */
static inline uint64_t difference(Block block, const Token *tokens, int32_t dc, int16_t *coefficients) {
    uint64_t differ = (uint64_t)(uint32_t)(block.dc ^ dc);
    for (uint32_t k = 1, place = 0; k < block.num_tokens; k++) {
        place += (symbol_of(tokens[k]) >> 4) + 1; /* runs of zeros and the block's end are followed by a zero as well */
        int16_t *coefficient = coefficients + PLACES[place];
        differ |= (uint64_t)(uint32_t)(*coefficient ^ value_of(tokens[k]));
        *coefficient = 0;
    }
    uint64_t rest[16];
    memcpy(rest, coefficients, sizeof rest);
    for (int k = 0; k < 16; k++) differ |= rest[k];
    return differ;
}

/* Whether all blocks of the image data are those of `scan`. Two segments at once, see blocks.h; `unstuffed` has room for them. */
static int has_blocks(Reader *reader, const Scan *scan, uint8_t *unstuffed) {
    const Jpeg *jpeg = reader->jpeg;
    size_t segment_blocks = (size_t)scan->interval * num_mcu_blocks(jpeg);
    if (jpeg->restart_interval != scan->interval || reader->num_segments * segment_blocks != scan->num_blocks) return 0;
    int16_t coefficients[2][BLOCK_ROOM] = {{0}};
    const Token *token[2] = {scan->tokens, scan->tokens};
    uint64_t differ = 0;
    for (size_t segment = 0; segment < reader->num_segments; segment += 2) {
        int is_pair = segment + 1 < reader->num_segments;
        uint8_t *to = unstuffed;
        const Block *block[2] = {scan->blocks + segment * segment_blocks, scan->blocks + (segment + 1) * segment_blocks};
        JpegBits bits[2];
        int32_t dc[2][3] = {{0}};
        token[0] = token[1];
        for (const Block *b = block[0]; b < block[1]; b++) token[1] += b->num_tokens;
        const Token *end = token[1];
        for (int j = 0; j <= is_pair; j++)
            if (!(to = next_segment(reader, to, bits + j))) return 0;
        for (uint32_t mcu = 0; mcu < scan->interval; mcu++) {
            int good = 1;
            for (int c = 0; c < jpeg->num_components && good; c++) {
                const Codes *of_dc = reader->dc + jpeg->components[c].dc, *of_ac = reader->ac + jpeg->components[c].ac;
                for (int k = jpeg->components[c].h * jpeg->components[c].v; k > 0 && good; k--) {
                    for (int j = 0; j <= is_pair; j++) dc[j][c] = take_dc(bits + j, of_dc, dc[j][c], &good);
                    good &= is_pair ? take_ac_pair(bits, bits + 1, of_ac, coefficients[0], coefficients[1]) : take_ac(bits, of_ac, 0, coefficients[0]);
                    for (int j = 0; j <= is_pair; j++) {
                        good &= !jpeg_bits_overrun(bits + j);
                        differ |= difference(*block[j], token[j], dc[j][c], coefficients[j]);
                        token[j] += block[j]++->num_tokens;
                    }
                }
            }
            if (!good) return 0;
        }
        for (int j = 0; j <= is_pair; j++)
            if (!jpeg_bits_finished(bits + j)) return 0;
        if (!is_pair) token[1] = end;
    }
    return !differ && what_follows(reader) == JPEG_OK;
}

/* Whether what makes coefficients an image is the same in both headers. */
static int same_image(const Jpeg *a, const Jpeg *b) {
    int same = a->width == b->width && a->height == b->height && a->num_components == b->num_components && a->is_rgb == b->is_rgb;
    for (int c = 0; c < a->num_components && same; c++) {
        const JpegComponent *p = a->components + c, *q = b->components + c;
        same = p->id == q->id && p->h == q->h && p->v == q->v && !memcmp(a->quant[p->quant], b->quant[q->quant], sizeof a->quant[0]);
    }
    return same;
}

static int prove(Reader *reader, const Jpeg *original, const Scan *scan, const uint8_t *data, size_t size) {
    Jpeg jpeg;
    if (jpeg_parse(data, size, &jpeg) != JPEG_OK || !same_image(original, &jpeg)) return TRANSCODE_UNPROVEN;
    open_reader(reader, &jpeg);
    uint8_t *unstuffed = malloc(segment_room(&jpeg, 2));
    int status = !unstuffed ? JPEG_MEMORY : has_blocks(reader, scan, unstuffed) ? JPEG_OK : TRANSCODE_UNPROVEN;
    free(unstuffed);
    return status;
}

/* ---- the whole ---------------------------------------------------------------------------------------------------- */

static int read_all(Reader *reader, const Jpeg *jpeg, Scan *scan) {
    open_reader(reader, jpeg);
    uint8_t *unstuffed = malloc(segment_room(jpeg, 1));
    int status = unstuffed ? read_scan(reader, unstuffed, scan) : JPEG_MEMORY;
    free(unstuffed);
    return status;
}

static int write_all(const Jpeg *jpeg, const Scan *scan, uint8_t *out, size_t room, size_t *size) {
    JpegHuffman dc[MAX_TABLES], ac[MAX_TABLES];
    Written of_dc[MAX_TABLES], of_ac[MAX_TABLES];
    for (int k = 0; k < num_tables(jpeg); k++) {
        make_huffman(scan->dc_counts[k], dc + k);
        make_huffman(scan->ac_counts[k], ac + k);
        make_written(dc + k, of_dc + k);
        make_written(ac + k, of_ac + k);
    }
    size_t bytes = most_bytes(jpeg, scan, of_dc, of_ac);
    if (!bytes) return JPEG_DAMAGED;
    *size = jpeg->scan_offset + 2 * MAX_TABLES * TABLE_BYTES + 32 + bytes;
    if (*size > room) return JPEG_MEMORY;
    uint8_t *unstuffed = malloc(bytes + 8);
    if (!unstuffed) return JPEG_MEMORY;
    uint8_t *end = write_headers(jpeg, scan->interval, dc, ac, copy_headers(jpeg, out));
    *size = (size_t)(write_segments(jpeg, scan, of_dc, of_ac, unstuffed, end) - out);
    free(unstuffed);
    return JPEG_OK;
}

/* Transcode the JPEG of `size` bytes into `out`, which has `room` bytes; returns a JpegStatus. JPEG_OK: *out_size of them are the result.
 * JPEG_MEMORY with *out_size above `room`: so many are needed. Else nothing was made of it. */
int vit_jpeg_transcode(const uint8_t *data, size_t size, uint8_t *out, size_t room, size_t *out_size) {
    Jpeg jpeg;
    *out_size = 0;
    int status = jpeg_parse(data, size, &jpeg);
    if (status != JPEG_OK) return status;
    Scan scan = {.interval = choose_interval(jpeg.mcus_wide)};
    Reader *reader = malloc(sizeof *reader); /* some 200 kB, more than the stack of a thread may have */
    status = reader ? read_all(reader, &jpeg, &scan) : JPEG_MEMORY;
    if (status == JPEG_OK) status = write_all(&jpeg, &scan, out, room, out_size);
    if (status == JPEG_OK) status = prove(reader, &jpeg, &scan, out, *out_size);
    free(reader);
    free(scan.tokens);
    free(scan.blocks);
    return status;
}
