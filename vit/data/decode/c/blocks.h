/* Huffman codes to blocks of coefficients, as fast as one core can, from one restart segment or from two at once.
 *
 * The data's story: a symbol is found by a look-up of the next bits. Until its length is known, the next one cannot be looked up: that
 * chain (shift, load, shift) is what entropy decoding costs, so nothing else is in it. The value comes out by a subtraction, beside the
 * chain; the block's end, a code too long for the table and damage share one test. Most symbols are short, so one look-up takes two where
 * it can. And two segments are two chains: decoded in turn, the processor works on both, in hardly more time than one takes.
 *
 * What is read. A block is 64 coefficients in zig-zag order. Place 0, DC, has a code for the number of bits of its difference from the block
 * before. The others follow as symbols RRRRSSSS: RRRR zeros, then a coefficient that is not zero, of SSSS bits, which stand behind the code.
 * Two symbols are different: F0 is 16 zeros, 00 says that all others are zero (end of block). A value of SSSS bits that begins with a 1 is
 * what it reads; one that begins with a 0 is negative, 2^SSSS - 1 less than it reads (table F.1).
 *
 * One symbol (`Codes.entry`, `take`). The next 11 bits are an index. A code of fewer bits owns all indices that begin with it: the lower
 * half of these has a 0 behind the code, so the value is negative, the upper half a positive one. Hence the entry can hold one number, the
 * base, that makes the value of code and value bits read as one number:
 *
 *     code 01 is symbol 02 (no zeros, 2 bits)        01 11 ...  reads 7, base 4         = 01 00      : value  3
 *     code 1100 is symbol 11 (one zero, 1 bit)       1100 0 ... reads 24, base 24 + 1   = 1100 0 + 1 : value -1
 *
 * with the bits that it takes (total: 4, and 5) and the places it goes on (step: zeros + 1). A code of 11 bits or more, or one that takes
 * more than 20 with its value, is not in the table: total 0, and `take_elsewhere` goes through the lengths one by one.
 *
 * Two symbols (`Codes.two`, `TAKE_AC`). If both, with their values, are within the 11 bits, one entry has what is needed of both. Of the
 * second all bits are known when the table is made, so the entry holds its value; of the first, which may be longer, the base:
 *
 *      01  11   1100  0    10        ONE_TOTAL 4   ONE_STEP 1   ONE_BASE  4     place + 1 gets  3
 *     code val  code val  next       TWO_TOTAL 9   TWO_STEP 2   TWO_VALUE -1    place + 3 gets -1, and place goes on by 3
 *     `-first-' `second-'
 *
 * Where there is no room for a second one, TWO_STEP is 0 and TWO_TOTAL the first one's: its "value" goes to the first one's place, and is
 * overwritten by the first one's.
 *
 * The block's end (`STEP_OUT`, `block_end`). `place` is that of the last coefficient, at most 62, as 63 ends a block. End of block, and what
 * is not in the table, have a step of 64, which leads out of the block from anywhere. So one comparison, place + both steps >= 63, finds:
 *
 *     the first is the end of block         ONE_STEP 64, total > 0         over
 *     the second is                         TWO_STEP 64, first inside      over
 *     a coefficient at place 63             sum 63                         over, without an end of block (F.2.2.2)
 *     the first one's is, or lies behind    first >= 63                    give back the second one's bits; over, or damage if it lies behind
 *     the second one's lies behind          sum > 63, first inside         damage
 *     the first is not in the table         ONE_STEP 64, total 0           `take_elsewhere`, and on
 *
 * Values are stored before the comparison: PLACES sends all that lies behind the block, up to 62 + 2 * 64, to a 65th coefficient that nobody
 * reads. tests/native/test_tables.py holds this page against the code.
 *
 * Sections, figures and tables are those of ITU-T T.81.
 */
#ifndef VIT_NATIVE_BLOCKS_H
#define VIT_NATIVE_BLOCKS_H

#include "jpeg.h"

#define INLINE static inline __attribute__((always_inline)) /* into bodies for several processors */

enum {
    CODE_BITS = 11,             /* looked up at once */
    VALUE_ROOM = 20,            /* bits of code and value together, if the symbol is in the table; 16 + 15 else, see `take_ac` */
    BLOCK_ROOM = 80,            /* coefficients of a block: 64, one that is written to instead of what lies behind, and an even size */
};

/* An entry for one symbol. */
enum {
    ENTRY_TOTAL = 63,    /* bits 0-5: bits of the code and of the value behind it */
    ENTRY_STEP = 6,      /* bits 6-11: how many places the symbol goes on in zig-zag order, 1 to 16; or ... */
    STEP_ELSEWHERE = 63, /* ... the block is over or, if the total is 0, the code is not in the table */
    ENTRY_BASE = 12,     /* bits 12-31: what to subtract from code and value, read as one number, to get the value */
};

/* An entry for one or two AC symbols. */
enum {
    TWO_TOTAL = 255, /* bits 0-7: bits of both */
    ONE_STEP = 8,    /* bits 8-15: places of the first one, or STEP_OUT */
    TWO_VALUE = 16,  /* bits 16-31: value of the second one */
    ONE_BASE = 32,   /* bits 32-47: as ENTRY_BASE, of the first one; values are 16 bits, so more do not matter */
    ONE_TOTAL = 48,  /* bits 48-55: bits of the first one; 0: not in the table */
    TWO_STEP = 56,   /* bits 56-63: places of the second one, or STEP_OUT; 0 if there is none */
    STEP_OUT = 64,   /* STEP_ELSEWHERE, but out of the block from its first place on */
};

typedef struct {
    uint32_t entry[1 << CODE_BITS];
    uint64_t two[1 << CODE_BITS]; /* AC only */
    uint32_t limit[18];           /* codes of a length are below this, as 16 bits; [17] ends the search */
    int32_t offset[17];           /* from a code of a length to its place among the values */
    const uint8_t *values;
    int is_ac;
} Codes;

INLINE uint32_t step_of(uint32_t entry) { return entry >> ENTRY_STEP & 63; }

/* Fill codes->two from codes->entry. */
INLINE void make_two(Codes *codes) {
    for (uint32_t i = 0; i < 1u << CODE_BITS; i++) {
        uint32_t first = codes->entry[i], total = first & ENTRY_TOTAL, step = step_of(first);
        uint32_t rest = i << total & ((1u << CODE_BITS) - 1), second = codes->entry[rest], more = second & ENTRY_TOTAL;
        uint32_t value = (rest >> ((CODE_BITS - more) & 31)) - (second >> ENTRY_BASE), next_step = step_of(second);
        step += step == STEP_ELSEWHERE, next_step += next_step == STEP_ELSEWHERE; /* to STEP_OUT */
        int has_second = step != STEP_OUT && more && total + more <= CODE_BITS;
        uint32_t low = has_second ? (total + more) | step << ONE_STEP | value << TWO_VALUE : total | step << ONE_STEP;
        uint32_t high = (first >> ENTRY_BASE & 0xFFFF) | total << (ONE_TOTAL - 32) | (has_second ? next_step << (TWO_STEP - 32) : 0);
        codes->two[i] = (uint64_t)high << 32 | low;
    }
}

/* Figures C.1 and C.2, straight into the look-up tables. Keeps a pointer to huffman->values. */
INLINE void make_codes(const JpegHuffman *huffman, int is_ac, Codes *codes) {
    uint32_t code = 0, place = 0;
    uint32_t *entry = codes->entry, *end = codes->entry + (1 << CODE_BITS);
    const uint32_t elsewhere = STEP_ELSEWHERE << ENTRY_STEP;
    codes->values = huffman->values, codes->is_ac = is_ac;
    for (uint32_t length = 1; length <= 16; length++, code <<= 1) {
        codes->offset[length] = (int32_t)place - (int32_t)code;
        for (int n = huffman->bits[length]; n > 0; n--, place++, code++) {
            if (length >= CODE_BITS) continue; /* one bit is left for the value's sign */
            uint32_t symbol = huffman->values[place], size = symbol & 15, step = is_ac ? (symbol >> 4) + 1 : 1;
            uint32_t half = 1u << (CODE_BITS - 1 - length), positive = code << size, negative = positive + (1u << size) - 1;
            uint32_t all = step << ENTRY_STEP | (length + size);
            if (length + size > VALUE_ROOM) all = elsewhere, positive = negative = 0;
            else if (is_ac && size == 0 && symbol != 0xF0) all = elsewhere | length; /* end of block; other zeros as libjpeg takes them */
            for (uint32_t i = 0; i < half; i++) *entry++ = all | negative << ENTRY_BASE; /* those that begin with a 0, table F.1 */
            for (uint32_t i = 0; i < half; i++) *entry++ = all | positive << ENTRY_BASE;
        }
        codes->limit[length] = code << (16 - length);
    }
    codes->limit[17] = 1u << 16;
    while (entry < end) *entry++ = elsewhere;
    if (is_ac) make_two(codes);
}

/* ---- one symbol ---------------------------------------------------------------------------------------------------- */

/* Take a symbol and its value off; the caller has refilled. The value means nothing if the step is STEP_ELSEWHERE. */
INLINE uint32_t take(JpegBits *bits, const Codes *codes, int32_t *value) {
    uint32_t entry = codes->entry[bits->bits >> (64 - CODE_BITS)];
    *value = (int32_t)(uint32_t)(bits->bits >> (-entry & 63)) - (int32_t)(entry >> ENTRY_BASE);
    jpeg_drop(bits, entry & ENTRY_TOTAL);
    return entry;
}

/* A symbol whose step is STEP_ELSEWHERE: its step (1 to 16), 0 at the block's end, -1 if the bits are no code. Needs 31 bits at hand. */
static __attribute__((noinline)) int take_elsewhere(JpegBits *bits, const Codes *codes, uint32_t entry, int32_t *value) {
    *value = 0;
    if (entry & ENTRY_TOTAL) return 0;
    uint32_t next = (uint32_t)(bits->bits >> 48), length = 1;
    while (next >= codes->limit[length]) length++;
    if (length > 16) return -1;
    uint8_t symbol = codes->values[((int32_t)(next >> (16 - length)) + codes->offset[length]) & 255];
    uint32_t size = symbol & 15;
    jpeg_drop(bits, length);
    if (size) {
        *value = jpeg_extend((uint32_t)(bits->bits >> (64 - size)), size);
        jpeg_drop(bits, size);
    }
    if (!codes->is_ac) return 1;
    return size || symbol == 0xF0 ? (symbol >> 4) + 1 : 0;
}

/* Bits in hand, apart from where they end: three numbers that can stay in registers. */
INLINE JpegBits in_hand(const JpegBits *stream) { return (JpegBits){.bits = stream->bits, .next = stream->next, .count = stream->count}; }

INLINE void put_back(JpegBits *stream, JpegBits bits) { stream->bits = bits.bits, stream->next = bits.next, stream->count = bits.count; }

/* The DC coefficient from that of the component's block before (F.2.2.1); *good is cleared if the bits are no code or it does not fit 16
 * bits. */
INLINE int32_t take_dc(JpegBits *bits, const Codes *codes, int32_t before, int *good) {
    int32_t value;
    jpeg_refill(bits);
    uint32_t entry = take(bits, codes, &value);
    if (__builtin_expect(step_of(entry) == STEP_ELSEWHERE, 0)) {
        JpegBits slow = *bits; /* a copy, so that `bits` itself can stay in registers */
        *good &= take_elsewhere(&slow, codes, entry, &value) > 0;
        put_back(bits, slow);
    }
    int32_t dc = before + value;
    *good &= dc == (int16_t)dc;
    return dc;
}

/* ---- the AC symbols of a block ------------------------------------------------------------------------------------- */

#define BEYOND_16 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64

/* Where the coefficient of a place in zig-zag order goes: its natural (row by row) place, figure A.6, and 64 for what lies beyond the block.
 * Places come to 62 + 2 * STEP_OUT at most. */
static const uint8_t PLACES[192] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6,  7,  14, 21, 28,
    35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63,
    BEYOND_16, BEYOND_16, BEYOND_16, BEYOND_16, BEYOND_16, BEYOND_16, BEYOND_16, BEYOND_16,
};

/* What to do when an entry brought the place from *place to 63 or beyond; `before` are the bits that it was found in. Values inside of
 * the block are kept already. */
typedef enum { BLOCK_GOES_ON, BLOCK_OVER, BLOCK_BAD } BlockState;

INLINE BlockState block_end(JpegBits *bits, uint64_t before, const Codes *codes, uint64_t entry, uint32_t *place, int16_t *coefficients) {
    uint32_t step = entry >> ONE_STEP & 255, next_step = (uint32_t)(entry >> TWO_STEP), total = entry >> ONE_TOTAL & ENTRY_TOTAL;
    int ends_first = (step == STEP_OUT) & (total != 0), ends_second = (next_step == STEP_OUT) & (*place + step < 63);
    if (__builtin_expect(ends_first | ends_second, 1)) return BLOCK_OVER; /* one jump, as which of both it is cannot be foretold */
    if (*place + step < 63) return *place + step + next_step == 63 ? BLOCK_OVER : BLOCK_BAD;
    if (step < STEP_OUT) { /* what was taken for a second one belongs to what follows this block */
        bits->bits = before << total;
        bits->count += (entry & TWO_TOTAL) - total;
        return *place + step == 63 ? BLOCK_OVER : BLOCK_BAD;
    }
    JpegBits slow = *bits; /* a copy, as in take_dc */
    int32_t value;
    int slow_step = take_elsewhere(&slow, codes, 0, &value);
    jpeg_refill(&slow); /* the caller may go on with another entry: 31 + 31 would be more than the 56 it began with */
    put_back(bits, slow);
    if (slow_step <= 0) return slow_step ? BLOCK_BAD : BLOCK_OVER;
    *place += (uint32_t)slow_step;
    if (*place > 63) return BLOCK_BAD;
    if (coefficients) coefficients[PLACES[*place]] = (int16_t)value;
    return *place == 63 ? BLOCK_OVER : BLOCK_GOES_ON;
}

/* One or two AC symbols (F.2.2.2): moves `place` on and keeps the values, or goes to `at_end` with `state` at the block's end. The
 * second value is written first: if there is none, it has the first one's place. */
#define TAKE_AC(in, place, coefficients, at_end)                                                                             \
    {                                                                                                                        \
        const uint64_t before = in.bits, entry = codes->two[before >> (64 - CODE_BITS)];                                     \
        const uint32_t place_1 = place + (entry >> ONE_STEP & 255), place_2 = place_1 + (uint32_t)(entry >> TWO_STEP);       \
        const uint32_t code_and_value = (uint32_t)(before >> (-(entry >> ONE_TOTAL) & 63));                                  \
        in.bits <<= entry & 63; /* a total is at most VALUE_ROOM */                                                          \
        in.count -= entry & TWO_TOTAL;                                                                                       \
        if (coefficients) coefficients[PLACES[place_2]] = (int16_t)(entry >> TWO_VALUE);                                     \
        if (coefficients) coefficients[PLACES[place_1]] = (int16_t)(code_and_value - (uint32_t)(entry >> ONE_BASE));         \
        if (__builtin_expect(place_2 >= 63, 0)) {                                                                            \
            state = block_end(&in, before, codes, entry, &place, coefficients);                                              \
            if (state != BLOCK_GOES_ON) goto at_end;                                                                         \
        } else {                                                                                                             \
            place = place_2;                                                                                                 \
        }                                                                                                                    \
    }

/* The AC coefficients behind `place`, into BLOCK_ROOM; or NULL, to pass over them. Returns 0 for damage. */
INLINE int take_ac(JpegBits *stream, const Codes *codes, uint32_t place, int16_t *coefficients) {
    JpegBits bits = in_hand(stream);
    BlockState state;
    for (;;) {
        jpeg_refill(&bits); /* 56 bits: two entries (20 + 20), or one and a symbol from elsewhere (20 + 31), which refills again */
        TAKE_AC(bits, place, coefficients, over)
        TAKE_AC(bits, place, coefficients, over)
    }
over:
    put_back(stream, bits);
    return state == BLOCK_OVER;
}

/* The same for two blocks of two segments, in turn. */
INLINE int take_ac_pair(JpegBits *stream_a, JpegBits *stream_b, const Codes *codes, int16_t *coefficients_a, int16_t *coefficients_b) {
    JpegBits a = in_hand(stream_a), b = in_hand(stream_b);
    uint32_t place_a = 0, place_b = 0;
    BlockState state;
    for (;;) {
        jpeg_refill(&a);
        jpeg_refill(&b);
        TAKE_AC(a, place_a, coefficients_a, a_over)
        TAKE_AC(b, place_b, coefficients_b, b_over)
        TAKE_AC(a, place_a, coefficients_a, a_over)
        TAKE_AC(b, place_b, coefficients_b, b_over)
    }
a_over:
    put_back(stream_a, a), put_back(stream_b, b);
    return state == BLOCK_OVER && take_ac(stream_b, codes, place_b, coefficients_b);
b_over:
    put_back(stream_a, a), put_back(stream_b, b);
    return state == BLOCK_OVER && take_ac(stream_a, codes, place_a, coefficients_a);
}

#endif
