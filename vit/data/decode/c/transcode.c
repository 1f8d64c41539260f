/* Transcode a baseline JPEG without loss: the same coefficients, with restart markers.
 *
 * 1. `read_scan` (scan.h) reads and counts the image data as tokens. A token is a Huffman code with
 *    its value.
 * 2. The counts determine optimal Huffman tables (annex K.2 of T.81; huffman.h).
 *    `write_segments` writes the tokens again with these tables and a restart marker every few
 *    MCUs. Headers are copied except for Huffman tables, restart interval and start of scan.
 * 3. `verify` decodes the result and compares all coefficients. A result that differs is never
 *    returned.
 *
 * From the first Huffman table on, the result equals the bytes that libjpeg-turbo's
 * `jpegtran -optimize -restart` writes.
 */
#include <stdlib.h>

#include "blocks.h"
#include "huffman.h"
#include "scan.h"

enum {
    /* Segments in a row of MCUs. With tiles of about 64 pixels, a crop reads 55 % of an image; with
     * four segments it would be 62 %. */
    WANTED_SEGMENTS = 8,
    MIN_INTERVAL = 2, /* MCUs, because each segment costs about 4 bytes */
    MAX_AC_BITS = 10, /* of a value; 8-bit images have no larger ones, and jpegtran rejects them */
    MAX_DC_BITS = 11,
};

/* Return the MCUs between two markers: a divisor of `mcus_wide`, so that all rows are cut alike.
 *
 * It is the largest divisor that gives WANTED_SEGMENTS, or else the smallest divisor, or else the
 * entire row.
 */
static uint32_t choose_interval(uint32_t mcus_wide) {
    uint32_t smallest = 0;
    uint32_t largest = 0;
    for (uint32_t interval = MIN_INTERVAL; interval <= mcus_wide / 2; interval++) {
        if (mcus_wide % interval) continue;
        if (!smallest) smallest = interval;
        if (mcus_wide / interval >= WANTED_SEGMENTS) largest = interval;
    }
    if (largest) return largest;
    return smallest ? smallest : mcus_wide;
}

/* ---- writing -------------------------------------------------------------------------------- */

/* Copy the headers up to the start of scan, except Huffman tables and restart interval.
 *
 * Returns the end of the copy.
 */
static uint8_t *copy_headers(const Jpeg *jpeg, uint8_t *to) {
    memcpy(to, jpeg->data, 2);
    to += 2;
    size_t at = 2;
    while (at < jpeg->sos_offset) { /* the segments were checked by `jpeg_parse` */
        size_t begin = at;
        while (jpeg->data[at] == 0xFF) at++;
        uint8_t marker = jpeg->data[at++];
        at += jpeg_be16(jpeg->data + at);
        if (marker == 0xC4 || marker == 0xDD) continue; /* DHT, DRI */
        memcpy(to, jpeg->data + begin, at - begin);
        to += at - begin;
    }
    return to;
}

/* Write the other headers: tables, restart interval, start of scan. Return their end. */
static uint8_t *write_headers(const Jpeg *jpeg, uint32_t interval, const JpegHuffman *dc,
                              const JpegHuffman *ac, uint8_t *to) {
    for (int k = 0; k < num_tables(jpeg); k++) {
        to = write_table(dc + k, (uint8_t)k, to);
        to = write_table(ac + k, (uint8_t)(0x10 | k), to);
    }
    const uint8_t dri[6] = {0xFF, 0xDD, 0, 4, (uint8_t)(interval >> 8), (uint8_t)interval};
    memcpy(to, dri, sizeof dri);
    to += sizeof dri;
    uint8_t n = (uint8_t)jpeg->num_components;
    const uint8_t sos[5] = {0xFF, 0xDA, 0, (uint8_t)(6 + 2 * n), n};
    memcpy(to, sos, sizeof sos);
    to += sizeof sos;
    for (int c = 0; c < n; c++) {
        *to++ = jpeg->components[c].id;
        *to++ = (uint8_t)(table_of(jpeg, c) * 0x11);
    }
    const uint8_t sequential[3] = {0, 63, 0}; /* all 64 coefficients, in full precision */
    memcpy(to, sequential, 3);
    return to + 3;
}

/* Write all segments and the end-of-image marker. Return their end.
 *
 * unstuffed: room for one segment and 8 bytes.
 */
static uint8_t *write_segments(const Jpeg *jpeg, const Scan *scan, const EncodeTable *dc,
                               const EncodeTable *ac, uint8_t *unstuffed, uint8_t *to) {
    const Token *token = scan->tokens;
    const TokenBlock *block = scan->blocks;
    const TokenBlock *end = block + scan->num_blocks;
    for (int segment = 0; block < end; segment++) {
        BitWriter writer = {0, unstuffed, 0};
        for (uint32_t mcu = 0; mcu < scan->interval; mcu++) {
            for (int c = 0; c < jpeg->num_components; c++) {
                const EncodeTable *dc_table = dc + table_of(jpeg, c);
                const EncodeTable *ac_table = ac + table_of(jpeg, c);
                for (int k = jpeg->components[c].h * jpeg->components[c].v; k > 0; k--, block++) {
                    const Token *block_end = token + block->num_tokens;
                    put(&writer, dc_table, symbol_of(*token), value_of(*token));
                    token++;
                    for (; token < block_end; token++) {
                        put(&writer, ac_table, symbol_of(*token), value_of(*token));
                    }
                }
            }
        }
        if (writer.count) { /* fill the last byte with ones, F.1.2.3 */
            uint32_t ones = 0xFF >> writer.count;
            *writer.next++ = (uint8_t)(writer.bits << (8 - writer.count) | ones);
        }
        to = stuff(unstuffed, writer.next, to);
        *to++ = 0xFF;
        *to++ = block < end ? (uint8_t)(0xD0 + (segment & 7)) : 0xD9;
    }
    return to;
}

/* Return the maximum size of the written image data; 0 if values exceed those of 8-bit images. */
static size_t max_scan_bytes(const Jpeg *jpeg, const Scan *scan, const EncodeTable *dc,
                             const EncodeTable *ac) {
    uint64_t bits = 0;
    for (int k = 0; k < num_tables(jpeg); k++) {
        for (int symbol = 0; symbol < 256; symbol++) {
            uint32_t dc_count = scan->dc_counts[k][symbol];
            uint32_t ac_count = scan->ac_counts[k][symbol];
            if (dc_count && symbol > MAX_DC_BITS) return 0;
            if (ac_count && (symbol & 15) > MAX_AC_BITS) return 0;
            bits += (uint64_t)dc_count * dc[k].length[symbol];
            bits += (uint64_t)ac_count * ac[k].length[symbol];
        }
    }
    uint64_t num_segments = (uint64_t)jpeg->mcus_high * (jpeg->mcus_wide / scan->interval);
    /* Stuffing at most doubles a segment. Its last byte is filled, and a marker follows. */
    return (size_t)(2 * (bits / 8 + 1) + 4 * num_segments);
}

/* Write the JPEG with the blocks of `scan` into `out`, which has `capacity` bytes.
 *
 * If the result is JPEG_MEMORY and *size exceeds `capacity`, *size is the required capacity.
 */
static Status write_jpeg(const Jpeg *jpeg, const Scan *scan, uint8_t *out, size_t capacity,
                         size_t *size) {
    JpegHuffman dc[MAX_TABLES];
    JpegHuffman ac[MAX_TABLES];
    EncodeTable dc_tables[MAX_TABLES];
    EncodeTable ac_tables[MAX_TABLES];
    for (int k = 0; k < num_tables(jpeg); k++) {
        make_huffman(scan->dc_counts[k], dc + k);
        make_huffman(scan->ac_counts[k], ac + k);
        make_encode_table(dc + k, dc_tables + k);
        make_encode_table(ac + k, ac_tables + k);
    }
    size_t bytes = max_scan_bytes(jpeg, scan, dc_tables, ac_tables);
    if (!bytes) return JPEG_DAMAGED;
    *size = jpeg->scan_offset + 2 * MAX_TABLES * MAX_TABLE_BYTES + 32 + bytes;
    if (*size > capacity) return JPEG_MEMORY;
    uint8_t *unstuffed = malloc(bytes + 8);
    if (!unstuffed) return JPEG_MEMORY;
    uint8_t *end = copy_headers(jpeg, out);
    end = write_headers(jpeg, scan->interval, dc, ac, end);
    end = write_segments(jpeg, scan, dc_tables, ac_tables, unstuffed, end);
    *size = (size_t)(end - out);
    free(unstuffed);
    return JPEG_OK;
}

/* ---- verification --------------------------------------------------------------------------- */

/* Return the bits that differ between a block's coefficients and its tokens; clear the former. */
static inline uint64_t difference(TokenBlock block, const Token *tokens, int32_t dc,
                                  int16_t *coefficients) {
    uint64_t differ = (uint64_t)(uint32_t)(block.dc ^ dc);
    uint32_t index = 0;
    for (uint32_t k = 1; k < block.num_tokens; k++) {
        index += (symbol_of(tokens[k]) >> 4) + 1; /* ZERO_RUN and END_OF_BLOCK: a zero, too */
        int16_t *coefficient = coefficients + NATURAL_ORDER[index];
        differ |= (uint64_t)(uint32_t)(*coefficient ^ value_of(tokens[k]));
        *coefficient = 0;
    }
    uint64_t rest[16]; /* all other coefficients must be zero */
    memcpy(rest, coefficients, sizeof rest);
    for (int k = 0; k < 16; k++) differ |= rest[k];
    return differ;
}

static inline uint32_t num_mcu_blocks(const Jpeg *jpeg) {
    uint32_t n = 0;
    for (int c = 0; c < jpeg->num_components; c++) {
        n += (uint32_t)jpeg->components[c].h * jpeg->components[c].v;
    }
    return n;
}

/* Return whether the image data consist of exactly the blocks of `scan`.
 *
 * Decodes two segments alternately, see blocks.h. `unstuffed` has room for both.
 */
static int has_blocks(Reader *reader, const Scan *scan, uint8_t *unstuffed) {
    const Jpeg *jpeg = reader->jpeg;
    size_t segment_blocks = (size_t)scan->interval * num_mcu_blocks(jpeg);
    if (jpeg->restart_interval != scan->interval) return 0;
    if (reader->num_segments * segment_blocks != scan->num_blocks) return 0;
    int16_t coefficients[2][BLOCK_ROOM] = {{0}};
    const Token *token[2] = {scan->tokens, scan->tokens};
    uint64_t differ = 0;
    for (size_t segment = 0; segment < reader->num_segments; segment += 2) {
        int is_pair = segment + 1 < reader->num_segments;
        const TokenBlock *block[2];
        block[0] = scan->blocks + segment * segment_blocks;
        block[1] = block[0] + segment_blocks;
        token[0] = token[1];
        for (const TokenBlock *b = block[0]; b < block[1]; b++) token[1] += b->num_tokens;
        const Token *end = token[1];
        JpegBits bits[2];
        int32_t dc[2][3] = {{0}};
        uint8_t *to = unstuffed;
        for (int j = 0; j <= is_pair; j++) {
            to = next_segment(reader, to, bits + j);
            if (!to) return 0;
        }
        for (uint32_t mcu = 0; mcu < scan->interval; mcu++) {
            int good = 1;
            for (int c = 0; c < jpeg->num_components && good; c++) {
                const JpegComponent *component = jpeg->components + c;
                const DecodeTable *dc_table = reader->dc + component->dc;
                const DecodeTable *ac_table = reader->ac + component->ac;
                for (int k = component->h * component->v; k > 0 && good; k--) {
                    for (int j = 0; j <= is_pair; j++) {
                        dc[j][c] = take_dc(bits + j, dc_table, dc[j][c], &good);
                    }
                    if (is_pair) {
                        good &= take_ac_pair(bits, bits + 1, ac_table, coefficients[0],
                                             coefficients[1]);
                    } else {
                        good &= take_ac(bits, ac_table, 0, coefficients[0]);
                    }
                    for (int j = 0; j <= is_pair; j++) {
                        good &= !jpeg_bits_overrun(bits + j);
                        differ |= difference(*block[j], token[j], dc[j][c], coefficients[j]);
                        token[j] += block[j]->num_tokens;
                        block[j]++;
                    }
                }
            }
            if (!good) return 0;
        }
        for (int j = 0; j <= is_pair; j++) {
            if (!jpeg_bits_finished(bits + j)) return 0;
        }
        if (!is_pair) token[1] = end;
    }
    return !differ && check_end(reader) == JPEG_OK;
}

/* Return whether both headers agree in everything that affects the pixels. */
static int same_image(const Jpeg *a, const Jpeg *b) {
    if (a->width != b->width || a->height != b->height) return 0;
    if (a->num_components != b->num_components || a->is_rgb != b->is_rgb) return 0;
    for (int c = 0; c < a->num_components; c++) {
        const JpegComponent *p = a->components + c;
        const JpegComponent *q = b->components + c;
        if (p->id != q->id || p->h != q->h || p->v != q->v) return 0;
        if (memcmp(a->quant[p->quant], b->quant[q->quant], sizeof a->quant[0])) return 0;
    }
    return 1;
}

/* Check that the JPEG `data` has the image of `original`, whose blocks are `scan`. */
static Status verify(Reader *reader, const Jpeg *original, const Scan *scan, const uint8_t *data,
                     size_t size) {
    Jpeg jpeg;
    if (jpeg_parse(data, size, &jpeg) != JPEG_OK) return TRANSCODE_MISMATCH;
    if (!same_image(original, &jpeg)) return TRANSCODE_MISMATCH;
    open_reader(reader, &jpeg);
    uint8_t *unstuffed = malloc(segment_bytes(&jpeg, 2));
    if (!unstuffed) return JPEG_MEMORY;
    int is_same = has_blocks(reader, scan, unstuffed);
    free(unstuffed);
    return is_same ? JPEG_OK : TRANSCODE_MISMATCH;
}

/* ---- transcoding ---------------------------------------------------------------------------- */

/* Read the image data of a JPEG into *scan, whose interval is set. */
static Status read_jpeg(Reader *reader, const Jpeg *jpeg, Scan *scan) {
    open_reader(reader, jpeg);
    uint8_t *unstuffed = malloc(segment_bytes(jpeg, 1));
    if (!unstuffed) return JPEG_MEMORY;
    Status status = read_scan(reader, unstuffed, scan);
    free(unstuffed);
    return status;
}

/* Transcode the JPEG of `size` bytes into `out`, which has `capacity` bytes; return a Status.
 *
 * After JPEG_OK, the result has *out_size bytes. After JPEG_MEMORY with *out_size above `capacity`,
 * *out_size is the required capacity. After any other status, `out` is undefined.
 */
int vit_jpeg_transcode(const uint8_t *data, size_t size, uint8_t *out, size_t capacity,
                       size_t *out_size) {
    Jpeg jpeg;
    *out_size = 0;
    Status status = jpeg_parse(data, size, &jpeg);
    if (status != JPEG_OK) return status;
    Reader *reader = malloc(sizeof *reader); /* about 200 kB: too much for the stack of a thread */
    if (!reader) return JPEG_MEMORY;
    Scan scan = {.interval = choose_interval(jpeg.mcus_wide)};
    status = read_jpeg(reader, &jpeg, &scan);
    if (status == JPEG_OK) status = write_jpeg(&jpeg, &scan, out, capacity, out_size);
    if (status == JPEG_OK) status = verify(reader, &jpeg, &scan, out, *out_size);
    free(reader);
    free(scan.tokens);
    free(scan.blocks);
    return status;
}
