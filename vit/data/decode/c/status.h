/* The results of the functions in this library: JPEG_OK, or the reason for the failure.
 *
 * vit/data/decode/native.py (`Status`) and data_prep/write/restart_markers.py (`REASONS`) repeat
 * these numbers.
 */
#ifndef VIT_STATUS_H
#define VIT_STATUS_H

typedef enum {
    JPEG_OK = 0,
    JPEG_DAMAGED = 1,     /* truncated, or violates the standard */
    JPEG_PROGRESSIVE = 2, /* Huffman-coded, but progressive */
    JPEG_PROCESS = 3,     /* arithmetic, lossless or hierarchical coding */
    JPEG_PRECISION = 4,   /* not 8 bits per sample */
    JPEG_COMPONENTS = 5,  /* neither 1 nor 3 components, as in CMYK */
    JPEG_SCANS = 6,       /* several scans: the components follow one another */
    JPEG_MEMORY = 7,      /* malloc failed, or the caller's buffer is too small */

    /* vit_decode_window only */
    WINDOW_OUTSIDE = 8,  /* the window is empty, or not inside the image */
    WINDOW_SAMPLING = 9, /* sampling factors that do not divide the image's, or coarser luma */
    WINDOW_COLORS = 10, /* gray pixels of an RGB image */
    WINDOW_IMAGE = 11,   /* not the expected image size, or too many pixels */

    /* vit_jpeg_transcode only */
    TRANSCODE_TRAILING = 16, /* bytes after the end of the image */
    TRANSCODE_MISMATCH = 17, /* a bug: the result does not decode to the same coefficients */
} Status;

#endif
