/* The page at the top of vit/data/decode/c/blocks.h, asked of the code; and blocks read with two symbols a look-up against one bit after the other. */
#include <stdio.h>
#include <stdlib.h>

#include "../../vit/data/decode/c/blocks.h"

#define MUST(condition)                                                                                                                  \
    do {                                                                                                                                 \
        if (!(condition)) printf("tables.c:%d: not so: %s\n", __LINE__, #condition), exit(1);                                            \
    } while (0)

/* The standard's first codes for luma (table K.5); then four that are not in the table by their values (0B, 0D), or by their length. */
static const JpegHuffman HUFFMAN = {
    .bits = {0, 0, 2, 1, 3, 3, 2, 2, 0, 0, 2, 1, 0, 0, 0, 0, 2},
    .values = {0x01, 0x02, 0x03, 0x00, 0x04, 0x11, 0x05, 0x12, 0x21, 0x31, 0x41, 0x06, 0x61, 0x0B, 0x0D, 0xF0, 0x7F, 0x0F},
};
static Codes codes;
static int16_t coefficients[BLOCK_ROOM], expected[BLOCK_ROOM];

static uint32_t next_bit(const uint8_t *from, long *used) {
    uint32_t bit = from[*used / 8] >> (7 - *used % 8) & 1;
    return ++*used, bit;
}

/* Figures F.13, F.14 and F.16, bit by bit: the bits that the block takes, or -1. */
static long read_slowly(const uint8_t *bytes, uint32_t place) {
    long used = 0;
    memset(expected, 0, sizeof expected);
    while (place < 63) {
        uint32_t code = 0, first = 0, index = 0, length = 0, raw = 0;
        do {
            index += HUFFMAN.bits[length], first = (first + HUFFMAN.bits[length]) << 1;
            if (++length > 16) return -1;
            code = code << 1 | next_bit(bytes, &used);
        } while (code >= first + HUFFMAN.bits[length]);
        uint32_t symbol = HUFFMAN.values[index + code - first], size = symbol & 15;
        if (symbol == 0) return used;
        for (uint32_t k = 0; k < size; k++) raw = raw << 1 | next_bit(bytes, &used);
        if ((place += (symbol >> 4) + 1) > 63) return -1;
        expected[PLACES[place]] = (int16_t)(size && !(raw >> (size - 1)) ? (int32_t)raw - (1 << size) + 1 : (int32_t)raw);
    }
    return used;
}

/* Both ways for a block whose last coefficient so far is at `place`: the bits it takes, or -1. */
static long read_block(const uint8_t *bytes, size_t size, uint32_t place) {
    JpegBits bits = jpeg_bits(bytes, size);
    memset(coefficients, 0, sizeof coefficients);
    long used = take_ac(&bits, &codes, place, coefficients) ? (long)size * 8 - (long)jpeg_bits_left(&bits) : -1;
    MUST(used == read_slowly(bytes, place));
    MUST(used < 0 || !memcmp(coefficients, expected, 64 * sizeof *expected));
    return used;
}

static uint8_t bytes[64 * 4 + JPEG_PADDING];

static long read_text(const char *text, uint32_t place) {
    size_t count = 0;
    memset(bytes, 0, sizeof bytes);
    for (; *text; text++)
        if (*text != ' ') bytes[count / 8] |= (uint8_t)((*text - '0') << (7 - count % 8)), count++;
    return read_block(bytes, 64 * 4, place);
}

static uint32_t total(uint64_t two) { return two & TWO_TOTAL; }
static uint32_t total_1(uint64_t two) { return two >> ONE_TOTAL & 255; }
static uint32_t step_1(uint64_t two) { return two >> ONE_STEP & 255; }
static uint32_t step_2(uint64_t two) { return (uint32_t)(two >> TWO_STEP); }

int main(void) {
    make_codes(&HUFFMAN, 1, &codes);

    /* one symbol, two symbols: the example */
    uint32_t first = codes.entry[0x3E2] /* 01 11 1100 0 10 */, second = codes.entry[0x610] /* 1100 0 ... */;
    MUST((first & ENTRY_TOTAL) == 4 && step_of(first) == 1 && first >> ENTRY_BASE == 4);
    MUST((second & ENTRY_TOTAL) == 5 && step_of(second) == 2 && second >> ENTRY_BASE == 24 + 1);
    uint64_t two = codes.two[0x3E2];
    MUST(total_1(two) == 4 && step_1(two) == 1 && (two >> ONE_BASE & 0xFFFF) == 4);
    MUST(total(two) == 9 && step_2(two) == 2 && (int16_t)(two >> TWO_VALUE) == -1);
    MUST(read_text("01 11 1100 0 1010", 5) == 13 && coefficients[PLACES[6]] == 3 && coefficients[PLACES[8]] == -1);
    two = codes.two[0x4FE]; /* 100 111 11110: a 7, and the beginning of a longer code */
    MUST(total(two) == 6 && total_1(two) == 6 && step_2(two) == 0 && (two >> TWO_VALUE & 0xFFFF) == 0);
    MUST((codes.entry[0x7A5] & ENTRY_TOTAL) == 0 && step_of(codes.entry[0x7A5]) == STEP_ELSEWHERE); /* a code of 16 bits */

    /* the block's end, in the order of the page: 1010 is the end of block, 00 1 a coefficient of 1, 1100 1 the same behind a zero */
    two = codes.two[0x500];
    MUST(step_1(two) == STEP_OUT && total_1(two) == 4 && read_text("1010", 7) == 4);
    two = codes.two[0x1A0]; /* 00 1 1010 0000 */
    MUST(step_1(two) == 1 && step_2(two) == STEP_OUT && read_text("00 1 1010", 7) == 7 && coefficients[PLACES[8]] == 1);
    MUST(read_text("00 1 00 1", 61) == 6 && coefficients[63] == 1);
    MUST(read_text("00 1 00 1", 62) == 3 && read_text("1100 1 00 1", 61) == 5 && read_text("1100 1 00 1", 62) == -1);
    MUST(read_text("00 1 1100 1", 61) == -1);
    two = codes.two[0x7A5];
    MUST(step_1(two) == STEP_OUT && total_1(two) == 0 && total(two) == 0);

    /* anything, from anywhere */
    srand(1);
    long ends[2] = {0, 0};
    for (int n = 0; n < 300000; n++) {
        for (size_t k = 0; k < 64 * 4; k++) bytes[k] = (uint8_t)(n % 2 ? rand() >> 8 : (rand() >> 8) & (rand() >> 8));
        ends[read_block(bytes, 64 * 4, (uint32_t)rand() % 63) >= 0]++;
    }
    MUST(ends[0] > 1000 && ends[1] > 1000);
    return 0;
}
