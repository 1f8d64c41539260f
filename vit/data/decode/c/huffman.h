/* The best Huffman tables for given counts of symbols, how they stand in a file, and how image data are written with them.
 *
 * Sections, figures and tables are those of ITU-T T.81.
 */
#ifndef VIT_NATIVE_HUFFMAN_H
#define VIT_NATIVE_HUFFMAN_H

#include "jpeg.h"

enum { NUM_NODES = 257, NO_SYMBOL = 256 /* never written; it gets the code of all ones, which no symbol may have */ };

/* Put `node` into `nodes`, which descend. */
static inline void insert(uint64_t *nodes, int *num_nodes, uint64_t node) {
    int place = (*num_nodes)++;
    for (; place && nodes[place - 1] < node; place--) nodes[place] = nodes[place - 1];
    nodes[place] = node;
}

/* How many bits the code of each symbol has by Huffman's method, without a limit; 0 for what never comes. Of equal counts the higher symbol is
 * joined first, as in libjpeg's `jpeg_gen_optimal_table` (jchuff.c): any order is as good, but this one gives the same bytes. */
static inline void code_lengths(const uint32_t counts[256], uint16_t lengths[NUM_NODES]) {
    uint64_t nodes[NUM_NODES]; /* count << 16 | NO_SYMBOL - symbol: the smallest is the next to join */
    uint16_t next[NUM_NODES];  /* symbol in the same node; itself at the end of the chain */
    int num_nodes = 0;
    for (uint16_t symbol = 0; symbol < NUM_NODES; symbol++) lengths[symbol] = 0, next[symbol] = symbol;
    for (uint32_t symbol = 0; symbol < 256; symbol++)
        if (counts[symbol]) insert(nodes, &num_nodes, (uint64_t)counts[symbol] << 16 | (NO_SYMBOL - symbol));
    insert(nodes, &num_nodes, 1 << 16);
    while (num_nodes > 1) {
        uint64_t first = nodes[--num_nodes], second = nodes[--num_nodes];
        insert(nodes, &num_nodes, first + (second >> 16 << 16)); /* both go by the first one's symbol now */
        uint16_t symbol = NO_SYMBOL - (first & 0xFFFF), other = NO_SYMBOL - (second & 0xFFFF);
        for (; next[symbol] != symbol; symbol = next[symbol]) lengths[symbol]++;
        lengths[symbol]++;
        next[symbol] = other;
        for (symbol = other; next[symbol] != symbol; symbol = next[symbol]) lengths[symbol]++;
        lengths[symbol]++;
    }
}

/* Fill *table for symbols that come `counts` times, one of them at least: annex K.2, with the longest codes cut to 16 bits by figure K.3. */
static inline void make_huffman(const uint32_t counts[256], JpegHuffman *table) {
    uint16_t lengths[NUM_NODES], bits[NUM_NODES] = {0}, place[NUM_NODES + 1] = {0}; /* place: in `values`, of the first symbol of a length */
    code_lengths(counts, lengths);
    for (int symbol = 0; symbol < NO_SYMBOL; symbol++) bits[lengths[symbol]]++;
    for (int length = 1; length < NUM_NODES; length++) place[length + 1] = place[length] + bits[length];
    bits[lengths[NO_SYMBOL]]++;
    for (int length = NUM_NODES - 1; length > 16; length--) {
        for (; bits[length]; bits[length] -= 2) { /* two codes that differ in the last bit: one loses it, the other shares a shorter code's place */
            int shorter = length - 2;
            while (!bits[shorter]) shorter--;
            bits[length - 1]++;
            bits[shorter]--;
            bits[shorter + 1] += 2;
        }
    }
    int longest = 16;
    while (!bits[longest]) longest--;
    bits[longest]--; /* of NO_SYMBOL */

    memset(table, 0, sizeof *table);
    for (int length = 1; length <= 16; length++) table->bits[length] = (uint8_t)bits[length];
    for (int symbol = 0; symbol < NO_SYMBOL; symbol++)
        if (lengths[symbol]) table->values[place[lengths[symbol]]++] = (uint8_t)symbol;
    table->defined = 1;
}

enum { TABLE_BYTES = 2 + 2 + 1 + 16 + 256 };

/* Write the whole DHT segment, at most TABLE_BYTES; returns the end. number: bits 0-3 the table, bit 4 set for AC. */
static inline uint8_t *write_table(const JpegHuffman *table, uint8_t number, uint8_t *to) {
    uint32_t count = 0;
    for (int length = 1; length <= 16; length++) count += table->bits[length];
    const uint8_t head[5] = {0xFF, 0xC4, (uint8_t)((19 + count) >> 8), (uint8_t)(19 + count), number};
    memcpy(to, head, 5);
    memcpy(to + 5, table->bits + 1, 16);
    memcpy(to + 21, table->values, count);
    return to + 21 + count;
}

/* What to write for each symbol: its code with zeros in place of the value, and the length of both together, 16 + 15 bits at most. */
typedef struct {
    uint32_t code[256];
    uint8_t length[256]; /* 0 for symbols without a code */
} Written;

static inline void make_written(const JpegHuffman *table, Written *written) {
    uint32_t code = 0, place = 0;
    memset(written, 0, sizeof *written);
    for (uint32_t length = 1; length <= 16; length++, code <<= 1) {
        for (int n = table->bits[length]; n > 0; n--, place++, code++) {
            uint32_t symbol = table->values[place], size = symbol & 15;
            written->code[symbol] = code << size;
            written->length[symbol] = (uint8_t)(length + size);
        }
    }
}

/* Bits of a segment without stuffing. `bits` ends with `count` of them, fewer than 8 between two calls of `put`. */
typedef struct {
    uint64_t bits;
    uint8_t *next; /* 8 bytes are written at once */
    uint32_t count;
} Writer;

static inline void put(Writer *writer, const Written *written, uint32_t symbol, int32_t value) {
    uint32_t length = written->length[symbol];
    uint32_t raw = (uint32_t)(value + (value >> 31)) & ((1u << (symbol & 15)) - 1); /* table F.1 backwards, see jpeg_extend */
    writer->bits = writer->bits << length | written->code[symbol] | raw;
    writer->count += length;
    uint64_t word = writer->bits << (64 - writer->count);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    memcpy(writer->next, &word, 8);
    writer->next += writer->count >> 3;
    writer->count &= 7;
}

/* Copy with a 00 behind each FF; returns the end. */
static inline uint8_t *stuff(const uint8_t *from, const uint8_t *end, uint8_t *to) {
    while (from < end) {
        const uint8_t *ff = memchr(from, 0xFF, (size_t)(end - from)), *stop = ff ? ff + 1 : end;
        memcpy(to, from, (size_t)(stop - from));
        to += stop - from;
        from = stop;
        if (ff) *to++ = 0;
    }
    return to;
}

#endif
