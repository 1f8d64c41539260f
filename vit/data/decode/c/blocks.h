/* Decode Huffman-coded blocks of coefficients, from one restart segment or from two alternately.
 *
 * The decoder finds a symbol by looking up the next bits. It cannot look up the next symbol until
 * the length of this one is known. This dependency chain (shift, load, shift) is the cost of
 * entropy decoding, so nothing else is in it. The value is computed by one subtraction outside the
 * chain. The end of a block, a code that is too long for the table, and damage share one test. Most
 * symbols are short, so one lookup returns two symbols if possible. Two segments are two chains. If
 * they are decoded alternately, the processor needs hardly more time for both than for one.
 *
 * The format. A block has 64 coefficients in zig-zag order. Index 0, DC, has a code for the number
 * of bits of its difference from the previous block's DC. The others follow as symbols RRRRSSSS:
 * RRRR zeros, then a nonzero coefficient of SSSS bits, which follow the code. Two symbols are
 * special: F0 means 16 zeros, 00 means that all others are zero (end of block). SSSS bits that
 * begin with a 1 are the value itself. If they begin with a 0, the value is negative: the bits
 * minus 2^SSSS - 1 (table F.1).
 *
 * One symbol (`DecodeTable.entry`, `take`). The next 11 bits are an index. A shorter code owns all
 * indices that begin with it. In their lower half, a 0 follows the code, so the value is negative.
 * In their upper half, the value is positive. An entry can therefore contain a single number, the
 * base. The value is code and value bits, read as one number, minus the base:
 *
 *     code 01 is symbol 02 (no zeros, 2 bits):
 *         01 11 ...  reads 7, base 4 (01 00), value 3
 *     code 1100 is symbol 11 (one zero, 1 bit):
 *         1100 0 ... reads 24, base 24 + 1 (1100 0, plus 1), value -1
 *
 * The entry also contains the number of bits to drop (total: 4, and 5) and of coefficients to
 * advance (step: zeros + 1). A code of 11 bits or more, or of more than 20 bits together with its
 * value, is not in the table. Its total is 0, and `take_slow` tries the lengths one by one.
 *
 * Two symbols (`DecodeTable.two`, `TAKE_AC`). If two symbols with their values fit in the 11 bits,
 * one entry describes both. All bits of the second symbol are known when the table is made, so the
 * entry contains its value. The first symbol may be longer, so the entry contains its base:
 *
 *      01  11   1100  0    10      ONE_TOTAL 4   ONE_STEP 1   ONE_BASE  4    index + 1 gets  3
 *     code val  code val  next     TWO_TOTAL 9   TWO_STEP 2   TWO_VALUE -1   index + 3 gets -1
 *     `-first-' `second-'                                                    index grows by 3
 *
 * Without a second symbol, TWO_STEP is 0 and TWO_TOTAL is the first one's total. The second "value"
 * is stored at the index of the first symbol, and then overwritten by the first value.
 *
 * The end of a block (`STEP_OUT`, `block_end`). `index` is that of the last coefficient and at most
 * 62, because 63 ends a block. The end of a block, and codes that are not in the table, have a step
 * of 64, which exceeds the block from any index. A single comparison, index + both steps >= 63,
 * therefore finds:
 *
 *     the first symbol is the end of block   ONE_STEP 64, total > 0      over
 *     the second one is                      TWO_STEP 64, first inside   over
 *     a coefficient at index 63              sum 63                      over (F.2.2.2)
 *     the first one is at 63                 first 63                    undo the second one; over
 *     the first one is beyond 63             first > 63                  damaged
 *     the second one is beyond 63            sum > 63, first inside      damaged
 *     the first one is not in the table      ONE_STEP 64, total 0        `take_slow`, and go on
 *
 * Values are stored before the comparison. NATURAL_ORDER maps all indices beyond the block, up to
 * 62 + 2 * 64, to a 65th coefficient that is never read. tests/native/test_tables.py checks this
 * comment against the code.
 *
 * Sections, figures and tables are those of ITU-T T.81.
 */
#ifndef VIT_BLOCKS_H
#define VIT_BLOCKS_H

#include "bits.h"

/* Inlined into functions that are compiled for several processors. */
#define INLINE static inline __attribute__((always_inline))

enum {
    LOOKUP_BITS = 11,    /* bits per lookup */
    MAX_ENTRY_BITS = 20, /* code and value, if in the table; otherwise 16 + 15, see `take_ac` */
    BLOCK_ROOM = 80,     /* coefficients: 64, one for all indices beyond the block; even */
};

/* A 32-bit entry for one symbol. */
enum {
    ENTRY_TOTAL = 63, /* mask of bits 0-5: bits of the code and of the value after it */
    ENTRY_STEP = 6,   /* bits 6-11: coefficients to advance, 1 to 16, or STEP_SLOW */
    STEP_SLOW = 63,   /* the block is over or, if the total is 0, the code is not in the table */
    ENTRY_BASE = 12,  /* bits 12-31: the number to subtract from code and value */
};

/* A 64-bit entry for one or two AC symbols. */
enum {
    TWO_TOTAL = 255, /* mask of bits 0-7: bits of both symbols */
    ONE_STEP = 8,    /* bits 8-15: step of the first symbol, or STEP_OUT */
    TWO_VALUE = 16,  /* bits 16-31: value of the second symbol */
    ONE_BASE = 32,   /* bits 32-47: ENTRY_BASE of the first symbol; values need only 16 bits */
    ONE_TOTAL = 48,  /* bits 48-55: bits of the first symbol; 0: not in the table */
    TWO_STEP = 56,   /* bits 56-63: step of the second symbol, or STEP_OUT; 0: no second symbol */
    STEP_OUT = 64,   /* like STEP_SLOW, but exceeds the block from its first coefficient on */
};

typedef struct {
    uint32_t entry[1 << LOOKUP_BITS];
    uint64_t two[1 << LOOKUP_BITS]; /* AC only */
    uint32_t limit[18];             /* codes of a length are below it, as 16 bits; [17]: stop */
    int32_t offset[17];             /* from a code of a length to its index in `values` */
    const uint8_t *values;
    int is_ac;
} DecodeTable;

INLINE uint32_t step_of(uint32_t entry) { return entry >> ENTRY_STEP & 63; }

/* Fill table->two from table->entry.
 *
 * Tables are built for each image. With `if` statements in this loop, a window of 250 x 200 pixels
 * takes 4 % longer.
 */
INLINE void make_two(DecodeTable *table) {
    for (uint32_t i = 0; i < 1u << LOOKUP_BITS; i++) {
        uint32_t first = table->entry[i];
        uint32_t first_total = first & ENTRY_TOTAL;
        uint32_t first_step = step_of(first);
        uint32_t rest = i << first_total & ((1u << LOOKUP_BITS) - 1);
        uint32_t second = table->entry[rest];
        uint32_t second_total = second & ENTRY_TOTAL;
        uint32_t second_step = step_of(second);
        uint32_t value = (rest >> ((LOOKUP_BITS - second_total) & 31)) - (second >> ENTRY_BASE);
        first_step += first_step == STEP_SLOW; /* STEP_OUT is STEP_SLOW + 1 */
        second_step += second_step == STEP_SLOW;
        uint32_t total = first_total + second_total;
        int has_second = first_step != STEP_OUT && second_total && total <= LOOKUP_BITS;
        uint32_t one = first_total | first_step << ONE_STEP;
        uint32_t both = total | first_step << ONE_STEP | value << TWO_VALUE;
        uint32_t low = has_second ? both : one;
        uint32_t high = (first >> ENTRY_BASE & 0xFFFF) | first_total << (ONE_TOTAL - 32);
        high |= has_second ? second_step << (TWO_STEP - 32) : 0;
        table->two[i] = (uint64_t)high << 32 | low;
    }
}

/* Build the lookup tables from code lengths and symbols, by figures C.1 and C.2.
 *
 * The tables contain a pointer to huffman->values.
 */
INLINE void make_decode_table(const JpegHuffman *huffman, int is_ac, DecodeTable *table) {
    const uint32_t slow = STEP_SLOW << ENTRY_STEP;
    uint32_t code = 0;
    uint32_t place = 0; /* in `values` */
    uint32_t *entry = table->entry;
    table->values = huffman->values;
    table->is_ac = is_ac;
    for (uint32_t length = 1; length <= 16; length++) {
        table->offset[length] = (int32_t)place - (int32_t)code;
        for (int n = huffman->bits[length]; n > 0; n--, place++, code++) {
            if (length >= LOOKUP_BITS) continue; /* one bit is left for the sign of the value */
            uint32_t symbol = huffman->values[place];
            uint32_t size = symbol & 15;
            uint32_t step = is_ac ? (symbol >> 4) + 1 : 1;
            uint32_t positive = code << size; /* the bases */
            uint32_t negative = positive + (1u << size) - 1;
            uint32_t rest = step << ENTRY_STEP | (length + size);
            if (length + size > MAX_ENTRY_BITS) {
                rest = slow;
                positive = 0;
                negative = 0;
            } else if (is_ac && size == 0 && symbol != 0xF0) {
                rest = slow | length; /* end of block: any such symbol, as in libjpeg */
            }
            uint32_t half = 1u << (LOOKUP_BITS - 1 - length);
            for (uint32_t i = 0; i < half; i++) *entry++ = rest | negative << ENTRY_BASE;
            for (uint32_t i = 0; i < half; i++) *entry++ = rest | positive << ENTRY_BASE;
        }
        table->limit[length] = code << (16 - length);
        code <<= 1;
    }
    table->limit[17] = 1u << 16;
    while (entry < table->entry + (1 << LOOKUP_BITS)) *entry++ = slow;
    if (is_ac) make_two(table);
}

/* ---- one symbol ----------------------------------------------------------------------------- */

/* Consume one symbol and its value from the bits; return its entry. The caller has refilled.
 *
 * If the step of the entry is STEP_SLOW, *value is undefined.
 */
INLINE uint32_t take(JpegBits *bits, const DecodeTable *table, int32_t *value) {
    uint32_t entry = table->entry[bits->bits >> (64 - LOOKUP_BITS)];
    uint32_t code_and_value = (uint32_t)(bits->bits >> (-entry & 63));
    *value = (int32_t)code_and_value - (int32_t)(entry >> ENTRY_BASE);
    jpeg_drop(bits, entry & ENTRY_TOTAL);
    return entry;
}

/* Consume a symbol whose step is STEP_SLOW. Needs 31 bits.
 *
 * Returns its step (1 to 16), 0 at the end of the block, or -1 if the bits are not a code.
 */
static __attribute__((noinline)) int take_slow(JpegBits *bits, const DecodeTable *table,
                                               uint32_t entry, int32_t *value) {
    *value = 0;
    if (entry & ENTRY_TOTAL) return 0;
    uint32_t next = (uint32_t)(bits->bits >> 48);
    uint32_t length = 1;
    while (next >= table->limit[length]) length++;
    if (length > 16) return -1;
    int32_t code = (int32_t)(next >> (16 - length));
    uint8_t symbol = table->values[(code + table->offset[length]) & 255];
    uint32_t size = symbol & 15;
    jpeg_drop(bits, length);
    if (size) {
        *value = jpeg_extend((uint32_t)(bits->bits >> (64 - size)), size);
        jpeg_drop(bits, size);
    }
    if (!table->is_ac) return 1;
    return size || symbol == 0xF0 ? (symbol >> 4) + 1 : 0;
}

/* Copy the three fields that change, but not the end, so that the copy can stay in registers. */
INLINE JpegBits local_copy(const JpegBits *stream) {
    return (JpegBits){.bits = stream->bits, .next = stream->next, .count = stream->count};
}

INLINE void write_back(JpegBits *stream, JpegBits bits) {
    stream->bits = bits.bits;
    stream->next = bits.next;
    stream->count = bits.count;
}

/* Return the DC coefficient, given that of the component's previous block (F.2.2.1).
 *
 * Clears *good if the bits are not a code or the coefficient does not fit in 16 bits.
 */
INLINE int32_t take_dc(JpegBits *bits, const DecodeTable *table, int32_t previous, int *good) {
    int32_t value;
    jpeg_refill(bits);
    uint32_t entry = take(bits, table, &value);
    if (__builtin_expect(step_of(entry) == STEP_SLOW, 0)) {
        JpegBits slow = *bits; /* passing `bits` itself would force it out of registers */
        *good &= take_slow(&slow, table, entry, &value) > 0;
        write_back(bits, slow);
    }
    int32_t dc = previous + value;
    *good &= dc == (int16_t)dc;
    return dc;
}

/* ---- the AC symbols of a block -------------------------------------------------------------- */

#define BEYOND_16 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64

/* Map zig-zag to natural (row by row) order, figure A.6. Indices beyond the block map to 64.
 *
 * Indices are at most 62 + 2 * STEP_OUT.
 */
/* clang-format off */
static const uint8_t NATURAL_ORDER[192] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,
    12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6,  7,  14, 21, 28,
    35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51,
    58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63,
    BEYOND_16, BEYOND_16, BEYOND_16, BEYOND_16, BEYOND_16, BEYOND_16, BEYOND_16, BEYOND_16,
};
/* clang-format on */

typedef enum { BLOCK_CONTINUES, BLOCK_OVER, BLOCK_DAMAGED } BlockState;

/* Decide how to continue after an entry that advanced *index to 63 or beyond.
 *
 * `before` are the bits in which the entry was found. Values inside the block are already stored.
 */
INLINE BlockState block_end(JpegBits *bits, uint64_t before, const DecodeTable *table,
                            uint64_t entry, uint32_t *index, int16_t *coefficients) {
    uint32_t first_step = entry >> ONE_STEP & 255;
    uint32_t second_step = (uint32_t)(entry >> TWO_STEP);
    uint32_t first_total = entry >> ONE_TOTAL & ENTRY_TOTAL;
    int is_first = (first_step == STEP_OUT) & (first_total != 0);
    int is_second = (second_step == STEP_OUT) & (*index + first_step < 63);
    /* One jump for both cases, because it is unpredictable which of them occurs. */
    if (__builtin_expect(is_first | is_second, 1)) return BLOCK_OVER;
    if (*index + first_step < 63) {
        return *index + first_step + second_step == 63 ? BLOCK_OVER : BLOCK_DAMAGED;
    }
    if (first_step < STEP_OUT) { /* the bits of the second symbol belong to the next block */
        bits->bits = before << first_total;
        bits->count += (entry & TWO_TOTAL) - first_total;
        return *index + first_step == 63 ? BLOCK_OVER : BLOCK_DAMAGED;
    }
    JpegBits slow = *bits; /* a copy, as in take_dc */
    int32_t value;
    int slow_step = take_slow(&slow, table, 0, &value);
    jpeg_refill(&slow); /* another entry may follow: 31 + 31 bits would exceed the 56 */
    write_back(bits, slow);
    if (slow_step == 0) return BLOCK_OVER;
    if (slow_step < 0) return BLOCK_DAMAGED;
    *index += (uint32_t)slow_step;
    if (*index > 63) return BLOCK_DAMAGED;
    if (coefficients) coefficients[NATURAL_ORDER[*index]] = (int16_t)value;
    return *index == 63 ? BLOCK_OVER : BLOCK_CONTINUES;
}

/* Consume one or two AC symbols (F.2.2.2): advance `index` and store the values, or go to `at_end`
 * with `state` at the end of the block. The second value is stored first. Without a second symbol,
 * it has the index of the first value and is overwritten. */
#define TAKE_AC(in, index, coefficients, at_end)                                               \
    {                                                                                          \
        const uint64_t before = in.bits;                                                       \
        const uint64_t entry = table->two[before >> (64 - LOOKUP_BITS)];                       \
        const uint32_t first = index + (entry >> ONE_STEP & 255);                              \
        const uint32_t second = first + (uint32_t)(entry >> TWO_STEP);                         \
        const uint32_t code_and_value = (uint32_t)(before >> (-(entry >> ONE_TOTAL) & 63));    \
        const uint32_t value = code_and_value - (uint32_t)(entry >> ONE_BASE);                 \
        in.bits <<= entry & 63; /* a total is at most MAX_ENTRY_BITS */                        \
        in.count -= entry & TWO_TOTAL;                                                         \
        if (coefficients) coefficients[NATURAL_ORDER[second]] = (int16_t)(entry >> TWO_VALUE); \
        if (coefficients) coefficients[NATURAL_ORDER[first]] = (int16_t)value;                 \
        if (__builtin_expect(second >= 63, 0)) {                                               \
            state = block_end(&in, before, table, entry, &index, coefficients);                \
            if (state != BLOCK_CONTINUES) goto at_end;                                         \
        } else {                                                                               \
            index = second;                                                                    \
        }                                                                                      \
    }

/* Read the AC coefficients after `index` into a block of BLOCK_ROOM; return 0 for damage.
 *
 * coefficients: NULL to skip them.
 */
INLINE int take_ac(JpegBits *stream, const DecodeTable *table, uint32_t index,
                   int16_t *coefficients) {
    JpegBits bits = local_copy(stream);
    BlockState state;
    for (;;) {
        /* 56 bits suffice for two entries (20 + 20), or for an entry and a slow symbol (20 + 31),
         * after which `block_end` refills again. */
        jpeg_refill(&bits);
        TAKE_AC(bits, index, coefficients, over)
        TAKE_AC(bits, index, coefficients, over)
    }
over:
    write_back(stream, bits);
    return state == BLOCK_OVER;
}

/* Read the AC coefficients of two blocks of two segments alternately; return 0 for damage. */
INLINE int take_ac_pair(JpegBits *stream_a, JpegBits *stream_b, const DecodeTable *table,
                        int16_t *coefficients_a, int16_t *coefficients_b) {
    JpegBits a = local_copy(stream_a);
    JpegBits b = local_copy(stream_b);
    uint32_t index_a = 0;
    uint32_t index_b = 0;
    BlockState state;
    for (;;) {
        jpeg_refill(&a);
        jpeg_refill(&b);
        TAKE_AC(a, index_a, coefficients_a, a_over)
        TAKE_AC(b, index_b, coefficients_b, b_over)
        TAKE_AC(a, index_a, coefficients_a, a_over)
        TAKE_AC(b, index_b, coefficients_b, b_over)
    }
a_over:
    write_back(stream_a, a);
    write_back(stream_b, b);
    return state == BLOCK_OVER && take_ac(stream_b, table, index_b, coefficients_b);
b_over:
    write_back(stream_a, a);
    write_back(stream_b, b);
    return state == BLOCK_OVER && take_ac(stream_a, table, index_a, coefficients_a);
}

#endif
