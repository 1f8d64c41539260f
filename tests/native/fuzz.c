/* Files that lie, for as long as is asked: built with sanitizers, so that a read or write outside of what the library was given ends it.
 *
 * The data's story: a seed is a good JPEG. Some of its bytes, lengths, tables, sizes and markers are changed or taken from another seed
 * (`mutate`), and it is copied to memory of its very size. A few windows of it are decoded by both implementations, into memory that holds
 * other bytes before (`check_window`): they must say the same, and if that is "OK" make the same pixels and write nothing beside them. Then
 * it is transcoded; where that is done, the result must decode to what the file decodes to.
 *
 *     fuzz SEED_FOLDER RANDOM_SEED MAX_FILES MAX_SECONDS
 *
 * Prints counts and a digest of all pixels. What broke the library is left in fuzz-failure.jpg. fuzz.py builds and runs this.
 */
#include <dirent.h>
#include <sanitizer/common_interface_defs.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

int vit_decode_window(const uint8_t *data, size_t size, uint32_t image_width, uint32_t image_height, uint32_t x, uint32_t y,
                      uint32_t width, uint32_t height, int channels, uint8_t *pixels, ptrdiff_t row_bytes, int portable);
int vit_jpeg_transcode(const uint8_t *data, size_t size, uint8_t *out, size_t room, size_t *out_size);

enum { ROOM = 1 << 18, MAX_SEEDS = 2048, MAX_SEGMENTS = 64, NUM_STATUS = 18, OK = 0, MEMORY = 7, UNPROVEN = 17 };

typedef struct {
    uint8_t *bytes;
    size_t size;
} File;

static File seeds[MAX_SEEDS], now; /* now: what is given to the library */
static uint8_t scratch[ROOM];
static size_t num_seeds;
static uint64_t state, digest = 14695981039346656037u, decoded[NUM_STATUS], transcoded[NUM_STATUS];

/* A number from 0 to n - 1; 0 for an n of 0. By splitmix64. */
static uint32_t below(size_t n) {
    uint64_t z = (state += 0x9E3779B97F4A7C15);
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9, z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return n ? (uint32_t)((z ^ z >> 31) % n) : 0;
}

static void save(void) {
    FILE *file = fopen("fuzz-failure.jpg", "wb");
    if (file) fwrite(now.bytes, 1, now.size, file), fclose(file);
}

static void must(int holds, const char *what) {
    if (holds) return;
    save();
    printf("FAILED: %s; the file is in fuzz-failure.jpg\n", what);
    exit(1);
}

/* ---- files ---------------------------------------------------------------------------------------------------------- */

static void read_seeds(const char *folder) {
    struct dirent **entries;
    int count = scandir(folder, &entries, NULL, alphasort); /* the same order everywhere */
    for (int k = 0; k < count && num_seeds < MAX_SEEDS; k++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/%s", folder, entries[k]->d_name);
        FILE *file = entries[k]->d_name[0] == '.' ? NULL : fopen(path, "rb");
        if (file) {
            seeds[num_seeds].bytes = malloc(ROOM);
            seeds[num_seeds].size = fread(seeds[num_seeds].bytes, 1, ROOM / 2, file);
            num_seeds++, fclose(file);
        }
        free(entries[k]);
    }
    free(entries);
    if (count <= 0 || !num_seeds) exit((printf("no seeds in %s\n", folder), 2));
}

typedef struct {
    size_t begin, end; /* from its FF on */
    int marker;
} Segment;

/* The segments of the headers, the start of scan being the last. */
static size_t find_segments(File file, Segment *segments) {
    size_t count = 0;
    for (size_t at = 2; count < MAX_SEGMENTS && at + 4 <= file.size && file.bytes[at] == 0xFF;) {
        size_t end = at + 2 + ((size_t)file.bytes[at + 2] << 8 | file.bytes[at + 3]);
        if (end > file.size || end < at + 4) break;
        segments[count++] = (Segment){at, end, file.bytes[at + 1]};
        if (file.bytes[at + 1] == 0xDA) break;
        at = end;
    }
    return count;
}

/* Put `size` bytes in the place of those from `begin` to `end`, if there is room. */
static void replace(File *file, size_t begin, size_t end, const uint8_t *bytes, size_t size) {
    if (file->size - (end - begin) + size > ROOM) return;
    memmove(file->bytes + begin + size, file->bytes + end, file->size - end);
    memcpy(file->bytes + begin, bytes, size);
    file->size += size - (end - begin);
}

static void mutate(File *file) {
    static const uint8_t edges[] = {0, 1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 63, 64, 127, 128, 254, 255};
    Segment segments[MAX_SEGMENTS], others[MAX_SEGMENTS];
    const File *other = seeds + below(num_seeds);
    size_t count = find_segments(*file, segments), at = below(file->size), end = at + below(40);
    uint8_t value = below(2) ? edges[below(sizeof edges)] : (uint8_t)below(256), *bytes = file->bytes;
    Segment *segment = count ? segments + below(count) : &(Segment){0, 4, 0};
    switch (below(12)) {
    case 0: bytes[at] = value; break;
    case 1: bytes[at] ^= (uint8_t)(1 << below(8)); break;
    case 2: file->size = at + 1; break;
    case 3: replace(file, at, end < file->size ? end : file->size, bytes, 0); break;
    case 4: replace(file, at, at, other->bytes + below(other->size), 1); break;
    case 5: { /* stuffing, fill bytes and markers where none are */
        const uint8_t marker[2] = {0xFF, below(2) ? (uint8_t)(0xD0 + below(10)) : below(2) ? 0xFF : value};
        replace(file, at, at + (file->size - at > 1 ? 2 * below(2) : 0), marker, 2);
        break;
    }
    case 6: { /* a table, frame or scan of another file, of the same kind if there is one */
        size_t of_other = find_segments(*other, others), from = of_other ? below(of_other) : 0, tries = of_other;
        while (tries-- && others[from].marker != segment->marker) from = (from + 1) % of_other;
        if (of_other) replace(file, segment->begin, segment->end, other->bytes + others[from].begin, others[from].end - others[from].begin);
        break;
    }
    case 7: if (segment->end > segment->begin + 4) bytes[segment->begin + 4 + below(segment->end - segment->begin - 4)] = value; break;
    case 8: bytes[segment->begin + 2 + below(2)] = value; break; /* its length */
    case 9: replace(file, segment->begin, segment->begin, other->bytes + 2, below(other->size - 2)); break;
    case 10: { /* the image data of another file from somewhere on */
        size_t from = below(other->size);
        replace(file, at, file->size, other->bytes + from, other->size - from);
        break;
    }
    case 11: { /* another restart interval */
        const uint8_t interval[6] = {0xFF, 0xDD, 0, 4, 0, value};
        replace(file, 2, 2, interval, 6);
    }
    }
    if (file->size < 4) file->size = 4;
}

/* ---- checks --------------------------------------------------------------------------------------------------------- */

typedef struct {
    uint32_t x, y, width, height, row_bytes, channels;
} Window;

/* The status of both implementations; OK: *pixels are to be freed. */
static int check_window(File file, Window w, uint8_t **pixels) {
    size_t size = (size_t)w.row_bytes * (w.height - 1) + (size_t)w.width * w.channels;
    uint8_t *by[2] = {malloc(size), malloc(size)};
    int status[2];
    for (int portable = 0; portable < 2; portable++) {
        memset(by[portable], portable ? 0xA5 : 0, size);
        status[portable] = vit_decode_window(file.bytes, file.size, 0, 0, w.x, w.y, w.width, w.height, (int)w.channels, by[portable],
                                             (ptrdiff_t)w.row_bytes, portable);
    }
    must(status[0] == status[1], "the implementations disagree whether a file is good");
    decoded[status[0]]++;
    for (size_t k = 0; status[0] == OK && k < size; k++) {
        int inside = k % w.row_bytes < w.width * w.channels;
        must(inside ? by[0][k] == by[1][k] : by[0][k] == 0 && by[1][k] == 0xA5, inside ? "other pixels" : "written between two rows");
        digest = (digest ^ by[0][k]) * 1099511628211u;
    }
    free(by[1]);
    if (status[0] == OK) *pixels = by[0];
    else free(by[0]);
    return status[0];
}

static Window some_window(File file) {
    Segment segments[MAX_SEGMENTS];
    uint32_t width = 16, height = 16; /* as the file's last frame says */
    for (size_t k = 0, count = find_segments(file, segments); k < count; k++) {
        const uint8_t *p = file.bytes + segments[k].begin;
        if ((segments[k].marker & 0xFE) == 0xC0 && segments[k].end >= segments[k].begin + 9) height = p[5] << 8 | p[6], width = p[7] << 8 | p[8];
    }
    width += !width, height += !height;
    Window w = {0, 0, width, height, 0, below(2) ? 3 : 1};
    if (below(3) || (uint64_t)w.width * w.height > 1 << 18) {
        w.width = 1 + below(w.width < 512 ? w.width : 512), w.height = 1 + below(w.height < 512 ? w.height : 512);
        w.x = below(width + 1 - w.width), w.y = below(height + 1 - w.height);
        if (!below(20)) w.x += below(w.width), w.y += below(w.height); /* partly outside */
    }
    w.row_bytes = w.width * w.channels + (below(2) ? below(40) : 0);
    return w;
}

static void check_file(File file) {
    size_t room = below(4) ? 3 * file.size + (1 << 16) : below(2 * file.size), size = 0;
    uint8_t *out = malloc(room ? room : 1);
    int status = vit_jpeg_transcode(file.bytes, file.size, out, room, &size);
    transcoded[status]++;
    must(status != UNPROVEN, "transcoding gave other coefficients");
    must(status != OK || size <= room, "transcoding gave more bytes than there was room for");
    for (int k = 0; k < 3; k++) {
        Window window = some_window(file);
        uint8_t *pixels = NULL, *again = NULL;
        int found = check_window(file, window, &pixels);
        if (status == OK) {
            must(check_window((File){out, size}, window, &again) == found, "transcoding made a good file a bad one, or the reverse");
            for (size_t y = 0; found == OK && y < window.height; y++) {
                size_t row = y * window.row_bytes;
                must(!memcmp(pixels + row, again + row, (size_t)window.width * window.channels), "transcoding changed pixels");
            }
        }
        free(pixels), free(again);
    }
    free(out);
}

static void print_counts(const char *what, const uint64_t *counts) {
    printf("%s", what);
    for (int k = 0; k < NUM_STATUS; k++)
        if (counts[k]) printf(" %d:%llu", k, (unsigned long long)counts[k]);
    printf("\n");
}

int main(int count, char **arguments) {
    if (count != 5) return printf("fuzz SEED_FOLDER RANDOM_SEED MAX_FILES MAX_SECONDS\n"), 2;
    read_seeds(arguments[1]);
    state = strtoull(arguments[2], NULL, 10);
    uint64_t max_files = strtoull(arguments[3], NULL, 10), files = 0;
    time_t end = time(NULL) + atol(arguments[4]);
    __sanitizer_set_death_callback(save);
    for (; files < max_files && (files % 64 || time(NULL) < end); files++) {
        const File *seed = seeds + below(num_seeds);
        File file = {scratch, seed->size};
        memcpy(scratch, seed->bytes, seed->size);
        for (uint32_t changes = below(5); changes; changes--) mutate(&file);
        now = (File){malloc(file.size), file.size};
        memcpy(now.bytes, file.bytes, file.size);
        check_file(now);
        free(now.bytes);
    }
    printf("files %llu\n", (unsigned long long)files);
    print_counts("windows by status", decoded);
    print_counts("transcoded by status", transcoded);
    printf("digest %016llx\n", (unsigned long long)digest);
    for (size_t k = 0; k < num_seeds; k++) free(seeds[k].bytes);
    return 0;
}
