/* Check the examples at the top of vit/data/decode/c/blocks.h against the code, and compare
 * decoding of two symbols per look-up with a decoder that reads one bit at a time. */
#include <stdio.h>
#include <stdlib.h>

#include "../../vit/data/decode/c/blocks.h"

#define MUST(condition)                                                  \
    do {                                                                 \
        if (!(condition)) {                                              \
            printf("tables.c:%d: not true: %s\n", __LINE__, #condition); \
            exit(1);                                                     \
        }                                                                \
    } while (0)

enum { BLOCK_BYTES = 64 * 4 /* 64 symbols of 16 + 15 bits */ };

/* The standard's first codes for luma (table K.5), and five codes that are not in the look-up table
 * because of their values (0B, 0D) or their length. */
static const JpegHuffman HUFFMAN = {
    .bits = {0, 0, 2, 1, 3, 3, 2, 2, 0, 0, 2, 1, 0, 0, 0, 0, 2},
    .values = {0x01, 0x02, 0x03, 0x00, 0x04, 0x11, 0x05, 0x12, 0x21, 0x31, 0x41, 0x06, 0x61, 0x0B,
               0x0D, 0xF0, 0x7F, 0x0F},
};
static DecodeTable table;
static int16_t coefficients[BLOCK_ROOM];
static int16_t expected[BLOCK_ROOM];
static uint8_t bytes[BLOCK_BYTES + JPEG_PADDING];

static uint32_t next_bit(const uint8_t *from, long *used) {
    uint32_t bit = from[*used / 8] >> (7 - *used % 8) & 1;
    ++*used;
    return bit;
}

/* Return the index of the next symbol in HUFFMAN.values, or -1 if the bits are not a code. */
static int next_symbol(const uint8_t *from, long *used) {
    uint32_t code = 0;
    uint32_t first = 0; /* first code of this length */
    uint32_t place = 0; /* index of that code */
    uint32_t length = 0;
    do {
        place += HUFFMAN.bits[length];
        first = (first + HUFFMAN.bits[length]) << 1;
        if (++length > 16) return -1;
        code = code << 1 | next_bit(from, used);
    } while (code >= first + HUFFMAN.bits[length]);
    return (int)(place + code - first);
}

/* Read a block bit by bit, as in figures F.13, F.14 and F.16; return its number of bits, or -1. */
static long read_slowly(const uint8_t *from, uint32_t index) {
    long used = 0;
    memset(expected, 0, sizeof expected);
    while (index < 63) {
        int place = next_symbol(from, &used);
        if (place < 0) return -1;
        uint32_t symbol = HUFFMAN.values[place];
        uint32_t size = symbol & 15;
        if (symbol == 0) return used;
        uint32_t raw = 0;
        for (uint32_t k = 0; k < size; k++) raw = raw << 1 | next_bit(from, &used);
        index += (symbol >> 4) + 1;
        if (index > 63) return -1;
        int32_t value = (int32_t)raw;
        if (size && !(raw >> (size - 1))) value += 1 - (1 << size);
        expected[NATURAL_ORDER[index]] = (int16_t)value;
    }
    return used;
}

/* Decode `bytes` both ways as a block that continues after `index`; return the number of bits, or
 * -1. */
static long read_block(uint32_t index) {
    JpegBits bits = jpeg_bits(bytes, BLOCK_BYTES);
    memset(coefficients, 0, sizeof coefficients);
    int good = take_ac(&bits, &table, index, coefficients);
    long used = good ? BLOCK_BYTES * 8 - (long)jpeg_bits_left(&bits) : -1;
    MUST(used == read_slowly(bytes, index));
    MUST(used < 0 || !memcmp(coefficients, expected, 64 * sizeof *expected));
    return used;
}

/* Decode bits given as text, followed by zeros. */
static long read_text(const char *text, uint32_t index) {
    size_t count = 0;
    memset(bytes, 0, sizeof bytes);
    for (; *text; text++) {
        if (*text == ' ') continue;
        bytes[count / 8] |= (uint8_t)((*text - '0') << (7 - count % 8));
        count++;
    }
    return read_block(index);
}

static uint32_t total(uint64_t two) { return two & TWO_TOTAL; }
static uint32_t first_total(uint64_t two) { return two >> ONE_TOTAL & 255; }
static uint32_t first_step(uint64_t two) { return two >> ONE_STEP & 255; }
static uint32_t first_base(uint64_t two) { return two >> ONE_BASE & 0xFFFF; }
static uint32_t second_step(uint64_t two) { return (uint32_t)(two >> TWO_STEP); }
static int16_t second_value(uint64_t two) { return (int16_t)(two >> TWO_VALUE); }

/* Check the example of one and two symbols in blocks.h. */
static void check_example(void) {
    uint32_t first = table.entry[0x3E2]; /* 01 11 1100 0 10 */
    MUST((first & ENTRY_TOTAL) == 4);
    MUST(step_of(first) == 1);
    MUST(first >> ENTRY_BASE == 4);
    uint32_t second = table.entry[0x610]; /* 1100 0 ... */
    MUST((second & ENTRY_TOTAL) == 5);
    MUST(step_of(second) == 2);
    MUST(second >> ENTRY_BASE == 24 + 1);
    uint64_t two = table.two[0x3E2];
    MUST(first_total(two) == 4);
    MUST(first_step(two) == 1);
    MUST(first_base(two) == 4);
    MUST(total(two) == 9);
    MUST(second_step(two) == 2);
    MUST(second_value(two) == -1);
    MUST(read_text("01 11 1100 0 1010", 5) == 13);
    MUST(coefficients[NATURAL_ORDER[6]] == 3);
    MUST(coefficients[NATURAL_ORDER[8]] == -1);
    two = table.two[0x4FE]; /* 100 111 11110: a 7, and the start of a longer code */
    MUST(total(two) == 6);
    MUST(first_total(two) == 6);
    MUST(second_step(two) == 0);
    MUST(second_value(two) == 0);
    uint32_t slow = table.entry[0x7A5]; /* a code of 16 bits */
    MUST((slow & ENTRY_TOTAL) == 0);
    MUST(step_of(slow) == STEP_SLOW);
}

/* Check the ends of blocks, in the order of blocks.h. 1010 is the end of block. 00 1 is a
 * coefficient of 1, and 1100 1 is a coefficient of 1 after a zero. */
static void check_block_ends(void) {
    uint64_t two = table.two[0x500]; /* 1010 0000000 */
    MUST(first_step(two) == STEP_OUT);
    MUST(first_total(two) == 4);
    MUST(read_text("1010", 7) == 4);
    two = table.two[0x1A0]; /* 00 1 1010 0000 */
    MUST(first_step(two) == 1);
    MUST(second_step(two) == STEP_OUT);
    MUST(read_text("00 1 1010", 7) == 7);
    MUST(coefficients[NATURAL_ORDER[8]] == 1);
    MUST(read_text("00 1 00 1", 61) == 6); /* the second coefficient is at 63 */
    MUST(coefficients[63] == 1);
    MUST(read_text("00 1 00 1", 62) == 3);   /* the first coefficient is at 63 */
    MUST(read_text("1100 1 00 1", 61) == 5); /* the same */
    MUST(read_text("1100 1 00 1", 62) == -1);
    MUST(read_text("00 1 1100 1", 61) == -1);
    two = table.two[0x7A5]; /* not in the table */
    MUST(first_step(two) == STEP_OUT);
    MUST(first_total(two) == 0);
    MUST(total(two) == 0);
}

/* Check random bits, starting at any index. */
static void check_random_blocks(void) {
    long num_good = 0;
    long num_damaged = 0;
    srand(1);
    for (int n = 0; n < 300000; n++) {
        for (size_t k = 0; k < BLOCK_BYTES; k++) {
            int random = rand() >> 8;
            if (n % 2 == 0) random &= rand() >> 8; /* more zeros: longer blocks */
            bytes[k] = (uint8_t)random;
        }
        if (read_block((uint32_t)rand() % 63) >= 0) {
            num_good++;
        } else {
            num_damaged++;
        }
    }
    MUST(num_good > 1000);
    MUST(num_damaged > 1000);
}

int main(void) {
    make_decode_table(&HUFFMAN, 1, &table);
    check_example();
    check_block_ends();
    check_random_blocks();
    return 0;
}
