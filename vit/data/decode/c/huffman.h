/* Write entropy-coded data: optimal Huffman tables for given symbol counts, and the bits.
 *
 * `make_huffman` builds a table from symbol counts. `write_table` writes the table as a DHT
 * segment, and `make_encode_table` expands it for encoding. `put` appends symbols and their values
 * to a segment, and `stuff` inserts a zero byte after each FF.
 *
 * Sections, figures and tables are those of ITU-T T.81.
 */
#ifndef VIT_HUFFMAN_H
#define VIT_HUFFMAN_H

#include "jpeg.h"

enum {
    NUM_NODES = 257,
    NO_SYMBOL = 256, /* never written: it reserves the code of all ones, which is not allowed */
    MAX_TABLE_BYTES = 2 + 2 + 1 + 16 + 256,
};

/* Insert `node` into `nodes`, which are in descending order. */
static inline void insert(uint64_t *nodes, int *num_nodes, uint64_t node) {
    int place = (*num_nodes)++;
    while (place && nodes[place - 1] < node) {
        nodes[place] = nodes[place - 1];
        place--;
    }
    nodes[place] = node;
}

/* Add one bit to the codes of all symbols in a chain; return the last symbol. */
static inline uint16_t lengthen_chain(uint16_t symbol, const uint16_t *next, uint16_t *lengths) {
    while (next[symbol] != symbol) {
        lengths[symbol]++;
        symbol = next[symbol];
    }
    lengths[symbol]++;
    return symbol;
}

/* Set the code length of each symbol by Huffman's method, without a limit; 0 if it never occurs.
 *
 * Of equal counts, the higher symbol is joined first, like in libjpeg's `jpeg_gen_optimal_table`
 * (jchuff.c). Any order is equally good, but this one produces the same bytes as jpegtran.
 */
static inline void code_lengths(const uint32_t counts[256], uint16_t lengths[NUM_NODES]) {
    uint64_t nodes[NUM_NODES]; /* count << 16 | NO_SYMBOL - symbol: the smallest is joined next */
    uint16_t next[NUM_NODES];  /* another symbol of the same node; itself at the end of the chain */
    int num_nodes = 0;
    for (uint16_t symbol = 0; symbol < NUM_NODES; symbol++) {
        lengths[symbol] = 0;
        next[symbol] = symbol;
    }
    for (uint32_t symbol = 0; symbol < 256; symbol++) {
        if (!counts[symbol]) continue;
        insert(nodes, &num_nodes, (uint64_t)counts[symbol] << 16 | (NO_SYMBOL - symbol));
    }
    insert(nodes, &num_nodes, 1 << 16); /* NO_SYMBOL, once */
    while (num_nodes > 1) {
        uint64_t first = nodes[--num_nodes];
        uint64_t second = nodes[--num_nodes];
        insert(nodes, &num_nodes, first + (second >> 16 << 16)); /* keeps the first one's symbol */
        uint16_t symbol = NO_SYMBOL - (first & 0xFFFF);
        uint16_t other = NO_SYMBOL - (second & 0xFFFF);
        uint16_t last = lengthen_chain(symbol, next, lengths);
        next[last] = other;
        lengthen_chain(other, next, lengths);
    }
}

/* Shorten all codes to at most 16 bits by figure K.3. bits: the number of codes of each length. */
static inline void limit_lengths(uint16_t bits[NUM_NODES]) {
    for (int length = NUM_NODES - 1; length > 16; length--) {
        while (bits[length]) {
            /* Two codes differ only in their last bit. One loses this bit, and the other moves next
             * to a shorter code, which grows by one bit. */
            int shorter = length - 2;
            while (!bits[shorter]) shorter--;
            bits[length] -= 2;
            bits[length - 1]++;
            bits[shorter]--;
            bits[shorter + 1] += 2;
        }
    }
}

/* Fill *table for symbols that occur `counts` times. At least one must occur (annex K.2). */
static inline void make_huffman(const uint32_t counts[256], JpegHuffman *table) {
    uint16_t lengths[NUM_NODES];
    uint16_t bits[NUM_NODES] = {0};
    uint16_t place[NUM_NODES + 1] = {0}; /* in `values`, of the first symbol of each length */
    code_lengths(counts, lengths);
    for (int symbol = 0; symbol < NO_SYMBOL; symbol++) bits[lengths[symbol]]++;
    for (int length = 1; length < NUM_NODES; length++) {
        place[length + 1] = place[length] + bits[length];
    }
    bits[lengths[NO_SYMBOL]]++;
    limit_lengths(bits);
    int longest = 16;
    while (!bits[longest]) longest--;
    bits[longest]--; /* the code of NO_SYMBOL */

    memset(table, 0, sizeof *table);
    for (int length = 1; length <= 16; length++) table->bits[length] = (uint8_t)bits[length];
    for (int symbol = 0; symbol < NO_SYMBOL; symbol++) {
        if (lengths[symbol]) table->values[place[lengths[symbol]]++] = (uint8_t)symbol;
    }
    table->defined = 1;
}

/* Write a complete DHT segment of at most MAX_TABLE_BYTES; return its end.
 *
 * number: bits 0-3 are the index of the table, bit 4 is set for AC.
 */
static inline uint8_t *write_table(const JpegHuffman *table, uint8_t number, uint8_t *to) {
    uint32_t count = 0;
    for (int length = 1; length <= 16; length++) count += table->bits[length];
    uint32_t size = 19 + count;
    const uint8_t head[5] = {0xFF, 0xC4, (uint8_t)(size >> 8), (uint8_t)size, number};
    memcpy(to, head, 5);
    memcpy(to + 5, table->bits + 1, 16);
    memcpy(to + 21, table->values, count);
    return to + 21 + count;
}

/* For each symbol: its code with zeros in place of the value, and the length of both together. */
typedef struct {
    uint32_t code[256];
    uint8_t length[256]; /* bits, at most 16 + 15; 0 for symbols without a code */
} EncodeTable;

static inline void make_encode_table(const JpegHuffman *huffman, EncodeTable *table) {
    uint32_t code = 0;
    uint32_t place = 0;
    memset(table, 0, sizeof *table);
    for (uint32_t length = 1; length <= 16; length++) {
        for (int n = huffman->bits[length]; n > 0; n--) {
            uint32_t symbol = huffman->values[place];
            uint32_t size = symbol & 15;
            table->code[symbol] = code << size;
            table->length[symbol] = (uint8_t)(length + size);
            place++;
            code++;
        }
        code <<= 1;
    }
}

/* A writer of a segment without stuffing.
 *
 * The last `count` bits of `bits` are not written yet; these are fewer than 8 between two calls of
 * `put`.
 */
typedef struct {
    uint64_t bits;
    uint8_t *next; /* each call writes 8 bytes here */
    uint32_t count;
} BitWriter;

/* Append a symbol and its value. */
static inline void put(BitWriter *writer, const EncodeTable *table, uint32_t symbol,
                       int32_t value) {
    uint32_t length = table->length[symbol];
    uint32_t mask = (1u << (symbol & 15)) - 1;
    uint32_t raw = (uint32_t)(value + (value >> 31)) & mask; /* the inverse of jpeg_extend */
    writer->bits = writer->bits << length | table->code[symbol] | raw;
    writer->count += length;
    uint64_t word = writer->bits << (64 - writer->count);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    memcpy(writer->next, &word, 8);
    writer->next += writer->count >> 3;
    writer->count &= 7;
}

/* Copy a segment with a 00 after each FF; return the end of the copy. */
static inline uint8_t *stuff(const uint8_t *from, const uint8_t *end, uint8_t *to) {
    while (from < end) {
        const uint8_t *ff = memchr(from, 0xFF, (size_t)(end - from));
        const uint8_t *stop = ff ? ff + 1 : end;
        memcpy(to, from, (size_t)(stop - from));
        to += stop - from;
        from = stop;
        if (ff) *to++ = 0;
    }
    return to;
}

#endif
