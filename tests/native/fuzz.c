/* Fuzz the C decoder and transcoder. Sanitizers end this program if it accesses memory outside
 * the library's.
 *
 * A seed is a valid JPEG. `mutate` changes some of its bytes, lengths, tables, sizes and markers or
 * takes them from another seed. The changed file is copied to memory of exactly its size. The
 * program transcodes the file, and decodes a few of its windows with both implementations
 * (`check_window`). Both must return the same status and, if the status is OK, the same pixels, and
 * must not write between the rows. If transcoding succeeds, the result must decode to the same
 * windows (`check_file`).
 *
 *     fuzz SEED_FOLDER RANDOM_SEED MAX_FILES MAX_SECONDS
 *
 * The program prints counts and a digest of all pixels. A file that fails is written to
 * fuzz-failure.jpg. fuzz.py builds and runs this program.
 */
#include <dirent.h>
#include <sanitizer/common_interface_defs.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "status.h"

int vit_decode_window(const uint8_t *data, size_t size, uint32_t image_width, uint32_t image_height,
                      uint32_t x, uint32_t y, uint32_t width, uint32_t height, int channels,
                      uint8_t *pixels, ptrdiff_t row_bytes, int portable);
int vit_jpeg_transcode(const uint8_t *data, size_t size, uint8_t *out, size_t capacity,
                       size_t *out_size);

enum {
    MAX_FILE_BYTES = 1 << 18,
    MAX_SEEDS = 2048,
    MAX_SEGMENTS = 64,
    NUM_STATUS = TRANSCODE_MISMATCH + 1,
};

typedef struct {
    uint8_t *bytes;
    size_t size;
} File;

static File seeds[MAX_SEEDS];
static size_t num_seeds;
static File current; /* the input of the library */
static uint8_t scratch[MAX_FILE_BYTES];
static uint64_t random_state;
static uint64_t digest = 14695981039346656037u; /* FNV-1a */
static uint64_t decoded[NUM_STATUS];
static uint64_t transcoded[NUM_STATUS];

/* Return a random number from 0 to n - 1 by splitmix64, or 0 if n is 0. */
static uint32_t below(size_t n) {
    random_state += 0x9E3779B97F4A7C15;
    uint64_t z = random_state;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    z = z ^ z >> 31;
    return n ? (uint32_t)(z % n) : 0;
}

static void save(void) {
    FILE *file = fopen("fuzz-failure.jpg", "wb");
    if (!file) return;
    fwrite(current.bytes, 1, current.size, file);
    fclose(file);
}

static void must(int condition, const char *failure) {
    if (condition) return;
    save();
    printf("FAILED: %s; the file is in fuzz-failure.jpg\n", failure);
    exit(1);
}

/* ---- files ---------------------------------------------------------------------------------- */

static void read_seeds(const char *folder) {
    struct dirent **entries;
    int count = scandir(folder, &entries, NULL, alphasort); /* the same order everywhere */
    for (int k = 0; k < count && num_seeds < MAX_SEEDS; k++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/%s", folder, entries[k]->d_name);
        FILE *file = entries[k]->d_name[0] == '.' ? NULL : fopen(path, "rb");
        if (file) {
            File *seed = seeds + num_seeds;
            seed->bytes = malloc(MAX_FILE_BYTES);
            seed->size = fread(seed->bytes, 1, MAX_FILE_BYTES / 2, file);
            num_seeds++;
            fclose(file);
        }
        free(entries[k]);
    }
    free(entries);
    if (count <= 0 || !num_seeds) {
        printf("no seeds in %s\n", folder);
        exit(2);
    }
}

/* A marker segment. */
typedef struct {
    size_t begin, end; /* starts at its FF */
    int marker;
} Segment;

/* Find the segments of the headers, up to and including the start of scan; return their number. */
static size_t find_segments(File file, Segment *segments) {
    size_t count = 0;
    size_t at = 2;
    while (count < MAX_SEGMENTS && at + 4 <= file.size && file.bytes[at] == 0xFF) {
        int marker = file.bytes[at + 1];
        size_t end = at + 2 + ((size_t)file.bytes[at + 2] << 8 | file.bytes[at + 3]);
        if (end > file.size || end < at + 4) break;
        segments[count++] = (Segment){at, end, marker};
        if (marker == 0xDA) break;
        at = end;
    }
    return count;
}

/* Replace the bytes from `begin` to `end` with `size` other bytes if they fit. */
static void replace(File *file, size_t begin, size_t end, const uint8_t *bytes, size_t size) {
    if (file->size - (end - begin) + size > MAX_FILE_BYTES) return;
    memmove(file->bytes + begin + size, file->bytes + end, file->size - end);
    memcpy(file->bytes + begin, bytes, size);
    file->size += size - (end - begin);
}

/* Insert stuffing, a fill byte or a marker at `at`. */
static void put_marker(File *file, size_t at, uint8_t value) {
    uint8_t marker[2] = {0xFF, value};
    if (below(2)) {
        marker[1] = (uint8_t)(0xD0 + below(10));
    } else if (below(2)) {
        marker[1] = 0xFF;
    }
    size_t replaced = file->size - at > 1 ? 2 * below(2) : 0;
    replace(file, at, at + replaced, marker, 2);
}

/* Replace a segment with one from another file, if possible of the same kind. */
static void replace_segment(File *file, const Segment *segment, const File *other) {
    Segment others[MAX_SEGMENTS];
    size_t count = find_segments(*other, others);
    if (!count) return;
    size_t chosen = below(count);
    for (size_t tries = 0; tries < count; tries++) {
        if (others[chosen].marker == segment->marker) break;
        chosen = (chosen + 1) % count;
    }
    const Segment *from = others + chosen;
    replace(file, segment->begin, segment->end, other->bytes + from->begin,
            from->end - from->begin);
}

/* Change a file in one of twelve ways. */
static void mutate(File *file) {
    static const uint8_t edges[] = {0, 1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 63, 64, 127, 128, 254, 255};
    Segment segments[MAX_SEGMENTS];
    const File *other = seeds + below(num_seeds);
    size_t count = find_segments(*file, segments);
    size_t at = below(file->size);
    size_t end = at + below(40);
    uint8_t value = below(2) ? edges[below(sizeof edges)] : (uint8_t)below(256);
    uint8_t *bytes = file->bytes;
    Segment *segment = count ? segments + below(count) : &(Segment){0, 4, 0};
    size_t content = segment->begin + 4; /* after marker and length */
    switch (below(12)) {
    case 0: /* another byte */
        bytes[at] = value;
        break;
    case 1: /* another bit */
        bytes[at] ^= (uint8_t)(1 << below(8));
        break;
    case 2: /* truncated */
        file->size = at + 1;
        break;
    case 3: /* bytes lost */
        replace(file, at, end < file->size ? end : file->size, bytes, 0);
        break;
    case 4: /* a byte inserted */
        replace(file, at, at, other->bytes + below(other->size), 1);
        break;
    case 5:
        put_marker(file, at, value);
        break;
    case 6:
        replace_segment(file, segment, other);
        break;
    case 7: /* another byte in a header */
        if (segment->end > content) bytes[content + below(segment->end - content)] = value;
        break;
    case 8: /* another length of a header */
        bytes[segment->begin + 2 + below(2)] = value;
        break;
    case 9: /* bytes of another file between two headers */
        replace(file, segment->begin, segment->begin, other->bytes + 2, below(other->size - 2));
        break;
    case 10: { /* the rest of another file */
        size_t from = below(other->size);
        replace(file, at, file->size, other->bytes + from, other->size - from);
        break;
    }
    case 11: { /* another restart interval */
        const uint8_t interval[6] = {0xFF, 0xDD, 0, 4, 0, value};
        replace(file, 2, 2, interval, 6);
        break;
    }
    }
    if (file->size < 4) file->size = 4;
}

/* ---- checks --------------------------------------------------------------------------------- */

typedef struct {
    uint32_t x, y, width, height, row_bytes, channels;
} Window;

/* Decode a window with both implementations; return the status.
 *
 * If the status is JPEG_OK, the caller must free *pixels.
 */
static int check_window(File file, Window w, uint8_t **pixels) {
    size_t size = (size_t)w.row_bytes * (w.height - 1) + (size_t)w.width * w.channels;
    uint8_t *results[2] = {malloc(size), malloc(size)};
    int status[2];
    for (int portable = 0; portable < 2; portable++) {
        uint8_t *result = results[portable];
        memset(result, portable ? 0xA5 : 0, size);
        status[portable] =
            vit_decode_window(file.bytes, file.size, 0, 0, w.x, w.y, w.width, w.height,
                              (int)w.channels, result, (ptrdiff_t)w.row_bytes, portable);
    }
    must(status[0] == status[1], "the implementations disagree whether a file is good");
    decoded[status[0]]++;
    for (size_t k = 0; status[0] == JPEG_OK && k < size; k++) {
        uint8_t a = results[0][k];
        uint8_t b = results[1][k];
        if (k % w.row_bytes < w.width * w.channels) {
            must(a == b, "other pixels");
        } else {
            must(a == 0 && b == 0xA5, "written between two rows");
        }
        digest = (digest ^ a) * 1099511628211u;
    }
    free(results[1]);
    if (status[0] == JPEG_OK) {
        *pixels = results[0];
    } else {
        free(results[0]);
    }
    return status[0];
}

/* Return a random window of the image that the headers describe: the whole image, a part, or a
 * window that is partly outside. */
static Window random_window(File file) {
    Segment segments[MAX_SEGMENTS];
    size_t count = find_segments(file, segments);
    uint32_t width = 16;
    uint32_t height = 16;
    for (size_t k = 0; k < count; k++) { /* the last frame header applies */
        const uint8_t *p = file.bytes + segments[k].begin;
        int is_frame = (segments[k].marker & 0xFE) == 0xC0;
        if (!is_frame || segments[k].end < segments[k].begin + 9) continue;
        height = p[5] << 8 | p[6];
        width = p[7] << 8 | p[8];
    }
    if (!width) width = 1;
    if (!height) height = 1;
    Window w = {0, 0, width, height, 0, below(2) ? 3 : 1};
    if (below(3) || (uint64_t)width * height > 1 << 18) {
        w.width = 1 + below(width < 512 ? width : 512);
        w.height = 1 + below(height < 512 ? height : 512);
        w.x = below(width + 1 - w.width);
        w.y = below(height + 1 - w.height);
        if (!below(20)) {
            w.x += below(w.width);
            w.y += below(w.height);
        }
    }
    w.row_bytes = w.width * w.channels + (below(2) ? below(40) : 0);
    return w;
}

/* Transcode a file, and compare three windows of the file with those of the result. */
static void check_file(File file) {
    size_t capacity = below(4) ? 3 * file.size + (1 << 16) : below(2 * file.size);
    size_t size = 0;
    uint8_t *out = malloc(capacity ? capacity : 1);
    int status = vit_jpeg_transcode(file.bytes, file.size, out, capacity, &size);
    transcoded[status]++;
    must(status != TRANSCODE_MISMATCH, "transcoding gave other coefficients");
    must(status != JPEG_OK || size <= capacity, "transcoding wrote more than there was room for");
    for (int k = 0; k < 3; k++) {
        Window w = random_window(file);
        uint8_t *pixels = NULL;
        uint8_t *again = NULL;
        int window_status = check_window(file, w, &pixels);
        if (status == JPEG_OK) {
            must(check_window((File){out, size}, w, &again) == window_status,
                 "transcoding made a good file a bad one, or the reverse");
            for (size_t y = 0; window_status == JPEG_OK && y < w.height; y++) {
                size_t row = y * w.row_bytes;
                int differ = memcmp(pixels + row, again + row, (size_t)w.width * w.channels);
                must(!differ, "transcoding changed pixels");
            }
        }
        free(pixels);
        free(again);
    }
    free(out);
}

static void print_counts(const char *what, const uint64_t *counts) {
    printf("%s", what);
    for (int k = 0; k < NUM_STATUS; k++) {
        if (counts[k]) printf(" %d:%llu", k, (unsigned long long)counts[k]);
    }
    printf("\n");
}

int main(int count, char **arguments) {
    if (count != 5) {
        printf("fuzz SEED_FOLDER RANDOM_SEED MAX_FILES MAX_SECONDS\n");
        return 2;
    }
    read_seeds(arguments[1]);
    random_state = strtoull(arguments[2], NULL, 10);
    uint64_t max_files = strtoull(arguments[3], NULL, 10);
    time_t end = time(NULL) + atol(arguments[4]);
    uint64_t files = 0;
    __sanitizer_set_death_callback(save);
    for (; files < max_files && (files % 64 || time(NULL) < end); files++) {
        const File *seed = seeds + below(num_seeds);
        File file = {scratch, seed->size};
        memcpy(scratch, seed->bytes, seed->size);
        for (uint32_t changes = below(5); changes; changes--) mutate(&file);
        current = (File){malloc(file.size), file.size};
        memcpy(current.bytes, file.bytes, file.size);
        check_file(current);
        free(current.bytes);
    }
    printf("files %llu\n", (unsigned long long)files);
    print_counts("windows by status", decoded);
    print_counts("transcoded by status", transcoded);
    printf("digest %016llx\n", (unsigned long long)digest);
    for (size_t k = 0; k < num_seeds; k++) free(seeds[k].bytes);
    return 0;
}
